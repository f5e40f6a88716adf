"""Draws: random values of parameters, to prove on what processing does to them."""

from collections.abc import Callable

import torch

_PIECE = 1 << 18
"""Elements that are drawn at once: what that takes stays in the processor's cache."""
_INDICES = ("idx",)
"""Ends of names of integers that kernels index scales with: any number might lead out of memory."""


def ordinary(
    generator: torch.Generator, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Random values of a parameter, such that nothing that processing may look at is always the same."""
    if "scale" in name and dtype.is_floating_point and dtype.itemsize > 1:
        return (0.5 + torch.rand(shape, generator=generator)).to(dtype)
    if dtype is torch.float8_e8m0fnu or ("scale" in name and dtype is torch.uint8):
        # Exponents with a bias of 127, as of MXFP4.
        return torch.randint(124, 131, shape, generator=generator, dtype=torch.uint8).view(dtype)
    if dtype is torch.float8_e4m3fn and "scale" in name:
        # From 1/64 to 30: no scale is negative, and formats without a sign for it drop one.
        return torch.randint(0x08, 0x60, shape, generator=generator, dtype=torch.uint8).view(dtype)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return _drawn(shape, dtype, lambda count: torch.randn(count, generator=generator))
    if dtype.is_floating_point:
        raw = torch.randint(0, 100, shape, generator=generator, dtype=torch.uint8)
        if "scale" in name:
            return raw.view(dtype)
        # Both signs; none of these is NaN.
        return (raw | torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8) << 7).view(dtype)
    if dtype is torch.bool or name.endswith(_INDICES):
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    # Any bits, the sign too: packed integers hold several elements each.
    size = (*shape, dtype.itemsize)
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


def strange(
    generator: torch.Generator, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Any bits that are a finite number, tiny and huge ones alike; of a scale, one that is not negative."""
    if dtype is torch.bool or (not dtype.is_floating_point and name.endswith(_INDICES)):
        return ordinary(generator, name, shape, dtype)
    value = _drawn(shape, dtype, lambda count: _finite(_bits(generator, count, dtype)))
    if "scale" not in name or not dtype.is_floating_point:
        return value
    return value.to(torch.float64).abs().to(dtype)


def _drawn(shape: tuple[int, ...], dtype: torch.dtype, draw: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """A tensor of what `draw` returns of so many elements, piece by piece."""
    value = torch.empty(shape, dtype=dtype)
    for piece in value.view(-1).split(_PIECE):
        piece.copy_(draw(piece.numel()))
    return value


def _bits(generator: torch.Generator, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bits, [count], drawn by 64."""
    nbytes = count * dtype.itemsize
    words = torch.randint(-(2**63), 2**63 - 1, (-(-nbytes // 8),), generator=generator)
    return words.view(torch.uint8)[:nbytes].view(dtype)


def _finite(value: torch.Tensor) -> torch.Tensor:
    """The numbers, with 0 instead of those that are none or infinite."""
    if not value.dtype.is_floating_point:
        return value
    wide = value.to(torch.float64) if value.itemsize == 1 else value  # torch asks no smaller ones
    return torch.where(wide.isfinite(), wide, 0.0).to(value.dtype)
