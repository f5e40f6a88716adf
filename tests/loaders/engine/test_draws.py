"""Random values that processing is proved on."""

import pytest
import torch

from loaders.engine.draws import ordinary, strange

FLOATS = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]
SHAPE = (3, 100_003)
"""More than are drawn at once, and no whole number of pieces or words."""


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


@pytest.mark.parametrize("draw", [ordinary, strange])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_draws_are_of_the_shape_and_of_the_seed(draw: object, dtype: torch.dtype) -> None:
    """The same seed gives the same bits, another one others, in the shape and dtype that were asked for."""
    assert callable(draw)
    one, same = (draw(generator(), "weight", SHAPE, dtype) for _ in range(2))
    assert (tuple(one.shape), one.dtype) == (SHAPE, dtype)
    assert torch.equal(raw(one), raw(same))
    assert not torch.equal(raw(one), raw(draw(generator(2), "weight", SHAPE, dtype)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_strange_numbers_are_finite_and_of_all_sizes(dtype: torch.dtype) -> None:
    """None is infinite or no number; every finite pattern of the high byte occurs, in every part."""
    drawn = strange(generator(), "weight", SHAPE, dtype)
    assert bool(drawn.to(torch.float64).isfinite().all())
    every = torch.arange(256, dtype=torch.uint8)
    low = torch.zeros(256, dtype.itemsize, dtype=torch.uint8)
    low[:, -1] = every
    number = low.view(dtype).to(torch.float64).view(-1)
    wanted = set(every[number.isfinite()].tolist())
    for row in drawn:
        high = raw(row.contiguous()).view(-1, dtype.itemsize)[:, -1]
        assert wanted <= set(high.unique().tolist())


@pytest.mark.parametrize("dtype", FLOATS)
def test_scales_are_never_negative(dtype: torch.dtype) -> None:
    """Formats that have no sign for a scale would drop it."""
    for draw in (ordinary, strange):
        assert bool((draw(generator(), "weight_scale", SHAPE, dtype).to(torch.float64) >= 0).all())


@pytest.mark.parametrize("dtype", INTEGERS)
def test_strange_integers_have_any_bits(dtype: torch.dtype) -> None:
    """Every byte takes every value."""
    drawn = raw(strange(generator(), "weight_packed", SHAPE, dtype)).view(-1, dtype.itemsize)
    assert all(drawn[:, at].unique().numel() == 256 for at in range(dtype.itemsize))


def test_indices_stay_small() -> None:
    """What kernels index with leads nowhere."""
    for draw in (ordinary, strange):
        assert int(draw(generator(), "g_idx", SHAPE, torch.int32).max()) == 1
