"""Points come out in order with their own bits, whatever their size and however far they reach."""

import numpy as np
import pytest
import torch

from loaders.engine.points import Points, is_rising

DTYPES = [torch.uint8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reach", [1000, 2**31, 2**31 + 1, 2**40])
def test_points_come_out_in_order(dtype: torch.dtype, reach: int) -> None:
    """Every position keeps its bits, extreme ones too, and 32 bits are used where positions fit."""
    generator = torch.Generator().manual_seed(1)
    rest = torch.randint(1, reach - 1, (500,), generator=generator).unique()
    positions = torch.cat(
        [torch.tensor([reach - 1, 0]), rest[torch.randperm(len(rest), generator=generator)]]
    )
    info = torch.iinfo(dtype)
    bits = torch.randint(0, info.max, positions.shape, generator=generator).to(dtype)
    bits[:4] = torch.tensor([info.min, info.max, 0, info.max - 1], dtype=dtype)
    wanted = dict(zip(positions.tolist(), bits.tolist(), strict=True))
    points = Points(positions.numel() + 3, reach, dtype)
    for piece in (slice(0, 7), slice(7, 7), slice(7, None)):
        points.add(positions[piece], bits[piece])
    assert len(points) == positions.numel()
    found, own = points.sorted()
    assert found.dtype is (torch.int32 if reach <= 2**31 else torch.int64) and own.dtype is dtype
    assert found.tolist() == sorted(wanted)
    assert dict(zip(found.tolist(), own.tolist(), strict=True)) == wanted


def test_no_points() -> None:
    """None in, none out."""
    positions, bits = Points(0, 10, torch.int16).sorted()
    assert positions.numel() == bits.numel() == 0


def test_rising_is_seen_across_pieces() -> None:
    """A fall between two pieces counts as one within."""
    assert is_rising(np.array([1, 1, 2, 5, 9]), piece=2)
    for numbers in ([2, 1], [1, 3, 2, 4, 5], [1, 2, 3, 2], [1, 2, 1, 3]):
        assert not is_rising(np.array(numbers), piece=2)
    assert is_rising(np.array([], np.int32))


def test_one_point_stands_for_itself() -> None:
    """A single point comes out contiguous and without the words that it was collected in."""
    points = Points(1000, 10, torch.uint8)
    points.add(torch.tensor([7]), torch.tensor([9], dtype=torch.uint8))
    positions, bits = points.sorted()
    assert (positions.tolist(), bits.tolist()) == ([7], [9])
    assert positions.stride() == bits.stride() == (1,)
    assert positions.untyped_storage().nbytes() == 4 and bits.untyped_storage().nbytes() == 1
