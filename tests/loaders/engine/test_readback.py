"""Reading back in checkpoint coordinates: what is here whole, and what is refused."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from loaders.engine.checkpoint import Checkpoint
from loaders.engine.readback import ReadPart, gather, whole, write_part
from loaders.engine.spot import identity
from schemas.bridge import ReadTensor
from schemas.dtypes import Dtype
from schemas.problems import Code, ProblemError
from tests.loaders.engine.atlases import Hand, Place, simple


def test_an_element_in_two_places_is_not_two_elements() -> None:
    """A tensor whose first half is here twice is half here."""
    hand = Hand()
    hand.add_tensor("w", (4,), Dtype.F32)
    whole = torch.empty(4)
    for site in ("a", "b"):
        hand.add_region("w", site, whole[:2], torch.empty(2), torch.float32)
        hand.sites[site] = Place(site, (2,), ((site, identity(site, 2)),))
        hand.targets[site] = torch.ones(2)
    assert gather(hand.atlas, ReadTensor(name="x", tensor="w"), torch.zeros(4)) == 2


def test_overlapping_parts_make_a_whole() -> None:
    """What two parameters hold together is read from both, wherever they overlap."""
    hand = Hand()
    hand.add_tensor("w", (4,), Dtype.F32)
    for site, begin, end in (("a", 0, 3), ("b", 1, 4)):
        hand.add_region("w", site, torch.empty(4)[begin:end], torch.empty(3), torch.float32)
        hand.sites[site] = Place(site, (3,), ((site, identity(site, 3)),))
        hand.targets[site] = torch.arange(begin, end, dtype=torch.float32)
    out = torch.zeros(4)
    assert gather(hand.atlas, ReadTensor(name="x", tensor="w"), out) == 4
    assert out.tolist() == [0, 1, 2, 3]


def test_a_site_without_places_cannot_be_read() -> None:
    """An unsupported parameter that has no place is refused with its reason."""
    hand = simple()
    hand.sites["p"] = Place("p", (4, 3), (), unsupported="no probe is known")
    with pytest.raises(ProblemError, match="no probe is known"):
        gather(hand.atlas, ReadTensor(name="x", tensor="w"), torch.zeros(12))


def test_what_no_rank_holds_is_read_from_the_files(tmp_path: Path) -> None:
    """Whole and by slice it is what the checkpoint's file has; unless that is asked for, nothing is found."""
    stored = torch.arange(12, dtype=torch.int32).view(3, 4)
    save_file({"g_idx": stored}, tmp_path / "model.safetensors")
    atlas: Any = SimpleNamespace(checkpoint=Checkpoint.open(tmp_path), regions={})
    for expert, wanted in ((None, stored), (2, stored[2])):
        out = torch.zeros(wanted.numel(), dtype=torch.int32)
        asked = ReadTensor(name="x", tensor="g_idx", expert=expert, loaded=False)
        assert gather(atlas, asked, out) == wanted.numel()
        assert torch.equal(out, wanted.flatten())
    assert gather(atlas, ReadTensor(name="x", tensor="g_idx"), torch.zeros(12, dtype=torch.int32)) == 0


def test_the_file_that_is_read_back(tmp_path: Path) -> None:
    """Whole tensors and slices, under the names asked for, in a file that safetensors accepts."""
    hand = simple((3, 2, 2), Dtype.BF16, torch.bfloat16)
    hand.targets["p"].copy_(torch.arange(12))
    path = tmp_path / "read.safetensors"
    wanted = (ReadTensor(name="all", tensor="w"), ReadTensor(name="one", tensor="w", expert=2))
    written = write_part(path, hand.atlas, wanted, {"format": "pt"})
    assert written == (path.stat().st_size, ((12, 12), (4, 4)))
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    found = load_file(path)
    assert found["all"].shape == (3, 2, 2) and found["all"].flatten().tolist() == list(range(12))
    assert found["one"].tolist() == [[8, 9], [10, 11]]


def test_a_full_disk_has_a_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked learns that there is no room, not that the engine broke."""

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ProblemError) as caught:
        write_part(tmp_path / "x", simple().atlas, (ReadTensor(name="x", tensor="w"),), {})
    assert caught.value.code is Code.DISK_FULL


def test_ranks_write_one_file_together(tmp_path: Path) -> None:
    """Two ranks that hold half of a tensor each leave the whole tensor in the file, and say so."""
    path, wanted = tmp_path / "read.safetensors", (ReadTensor(name="w", tensor="w"),)
    parts = []
    for rank in range(2):
        hand = Hand()
        hand.add_tensor("w", (2, 4), Dtype.BF16)
        columns = torch.empty(2, 4)[:, 2 * rank : 2 * rank + 2]
        hand.add_region("w", "p", columns, torch.empty(2, 2), torch.bfloat16)
        hand.sites["p"] = Place("p", (2, 2), (("p", identity("p", 4)),))
        hand.targets["p"] = torch.full((4,), float(rank + 1), dtype=torch.bfloat16)
        nbytes, held = write_part(path, hand.atlas, wanted, {})
        parts.append(ReadPart(version=3, nbytes=nbytes, held=held))
    assert whole(parts).version == 3
    assert load_file(path)["w"].tolist() == [[1, 1, 2, 2], [1, 1, 2, 2]]


def test_elements_on_no_rank_are_noticed() -> None:
    """A read-back in which ranks together wrote too little is refused; so are two versions."""
    part = ReadPart(version=1, nbytes=8, held=((2, 5),))
    with pytest.raises(ProblemError, match="4 of 5"):
        whole([part, part])
    with pytest.raises(ProblemError, match="in between"):
        whole([part, part.model_copy(update={"version": 2})])
