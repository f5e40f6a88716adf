"""Reading back in checkpoint coordinates: what is here whole, and what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from loaders.engine.readback import gather, write_safetensors
from loaders.engine.spot import identity
from schemas.bridge import ReadTensor
from schemas.dtypes import Dtype
from schemas.problems import Code, ProblemError
from tests.loaders.engine.atlases import Hand, Place, simple


def test_an_element_in_two_places_is_not_two_elements() -> None:
    """A tensor whose first half is here twice is not here whole."""
    hand = Hand()
    hand.add_tensor("w", (4,), Dtype.F32)
    whole = torch.empty(4)
    for site in ("a", "b"):
        hand.add_region("w", site, whole[:2], torch.empty(2), torch.float32)
        hand.sites[site] = Place(site, (2,), ((site, identity(site, 2)),))
        hand.targets[site] = torch.ones(2)
    with pytest.raises(ProblemError, match="2 of 4 elements"):
        gather(hand.atlas, ReadTensor(name="x", tensor="w"))


def test_overlapping_parts_make_a_whole() -> None:
    """What two parameters hold together is read from both, wherever they overlap."""
    hand = Hand()
    hand.add_tensor("w", (4,), Dtype.F32)
    for site, begin, end in (("a", 0, 3), ("b", 1, 4)):
        hand.add_region("w", site, torch.empty(4)[begin:end], torch.empty(3), torch.float32)
        hand.sites[site] = Place(site, (3,), ((site, identity(site, 3)),))
        hand.targets[site] = torch.arange(begin, end, dtype=torch.float32)
    assert gather(hand.atlas, ReadTensor(name="x", tensor="w")).tolist() == [0, 1, 2, 3]


def test_a_site_without_places_cannot_be_read() -> None:
    """An unsupported parameter that has no place is refused with its reason."""
    hand = simple()
    hand.sites["p"] = Place("p", (4, 3), (), unsupported="no probe is known")
    with pytest.raises(ProblemError, match="no probe is known"):
        gather(hand.atlas, ReadTensor(name="x", tensor="w"))


def test_the_file_that_is_read_back(tmp_path: Path) -> None:
    """Whole tensors and slices, under the names asked for, in a file that safetensors accepts."""
    hand = simple((3, 2, 2), Dtype.BF16, torch.bfloat16)
    hand.targets["p"].copy_(torch.arange(12))
    path = tmp_path / "read.safetensors"
    wanted = (ReadTensor(name="all", tensor="w"), ReadTensor(name="one", tensor="w", expert=2))
    assert write_safetensors(path, hand.atlas, wanted, {"format": "pt"}) == path.stat().st_size
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    found = load_file(path)
    assert found["all"].shape == (3, 2, 2) and found["all"].flatten().tolist() == list(range(12))
    assert found["one"].tolist() == [[8, 9], [10, 11]]


def test_a_full_disk_has_a_code() -> None:
    """Whoever asked learns that there is no room, not that the engine broke."""
    with pytest.raises(ProblemError) as caught:
        write_safetensors(Path("/dev/full"), simple().atlas, (ReadTensor(name="x", tensor="w"),), {})
    assert caught.value.code is Code.DISK_FULL
