"""Casts of a region: as the loader makes them on the way in, and whether the way back is exact."""

from itertools import product

import pytest
import torch

from loaders.engine.layout import Correspondence, Layout
from loaders.engine.provenance import Region

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOATS = (E4M3, E5M2, F16, BF16, F32, F64)


def region(first: torch.dtype, last: torch.dtype, *through: torch.dtype) -> Region:
    place = Layout.contiguous((4,))
    return Region("w", "p", Correspondence(place, place), first, last, through)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """All finite numbers of a dtype of one or two bytes; of a wider one, some with all their bits."""
    if dtype.itemsize <= 2:
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
        raw = bits.view(dtype) if dtype.itemsize == 2 else torch.arange(256, dtype=torch.uint8).view(dtype)
        return raw[torch.isfinite(raw.double())]
    drawn = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=F64)
    return torch.cat([drawn, drawn * 1e30, drawn * 1e-30]).to(dtype)


@pytest.mark.parametrize(("first", "last"), list(product(FLOATS, FLOATS)))
def test_lossless_is_what_comes_back(first: torch.dtype, last: torch.dtype) -> None:
    """A cast is lossless exactly if every number of the checkpoint's dtype comes back as it was."""
    found = region(first, last)
    values = numbers(first)
    back = found.back(found.into(values))
    assert found.lossless is torch.equal(back.double(), values.double())
    assert found.cast is (first != last) and found.refusal is None


def test_every_step_is_made() -> None:
    """Rounding on the way is not skipped, though first and last hold more."""
    found = region(F32, F32, BF16)
    values = torch.tensor([0.1, 1.0, -0.0, float("nan")])
    assert torch.equal(found.into(values).view(torch.int32), values.bfloat16().float().view(torch.int32))
    assert found.cast and not found.lossless
    assert region(BF16, BF16, F32).lossless


def test_no_cast_leaves_bits_alone() -> None:
    """Without a cast values pass as they are, NaN and all."""
    found = region(BF16, BF16)
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(BF16)
    assert torch.equal(found.back(found.into(values)).view(torch.int16), values.view(torch.int16))
    assert not found.cast and found.lossless


@pytest.mark.parametrize("steps", [(F32, torch.int8), (BF16, BF16, torch.int32), (torch.int32, torch.int64)])
def test_casts_that_are_no_rounding_are_refused(steps: tuple[torch.dtype, ...]) -> None:
    """From floats to integers, or between integers of two sizes, new values would mean something else."""
    first, last, *through = steps
    assert f"stored as {first}, runs as {last}" == region(first, last, *through).refusal
    assert region(torch.uint8, torch.uint8).refusal is None
    assert region(torch.int64, F32).refusal is None and not region(torch.int64, F32).lossless
