"""Tiles: a kernel's order of a block as strides, so that whole parts of the block are copied at once."""

import numpy as np
import torch

from loaders.engine.layout import Correspondence, Layout

_MOST = 8
"""Dimensions of a layout; what needs more is no regular order."""


def strided(table: torch.Tensor) -> Layout | None:
    """The layout whose positions, in order, are `table`, [n]; none if no layout of few dimensions is."""
    numbers = table.to(torch.int64).numpy()
    sizes: list[int] = []
    strides: list[int] = []
    rest = numbers
    while len(rest) > 1:
        if len(sizes) == _MOST:
            return None
        step = int(rest[1] - rest[0])
        breaks = np.flatnonzero(np.diff(rest) != step)
        count = int(breaks[0]) + 1 if len(breaks) else len(rest)
        if step <= 0 or len(rest) % count:
            return None
        sizes.insert(0, count)
        strides.insert(0, step)
        rest = rest[::count]
    found = Layout(int(numbers[0]) if len(numbers) else 0, tuple(sizes), tuple(strides))
    return found if np.array_equal(found.positions().numpy(), numbers) else None


def through(part: Correspondence, tiles: Layout) -> Correspondence | None:
    """`part` with its destination, elements of a block, led on to where `tiles` puts them.

    Element `i` of the block, in row-major order of the tiles' digits, stands at `tiles`' position `i`. Every
    dimension of the part is split along these digits. None if its steps do not fall in with them.
    """
    if part.src.numel == 0:
        return None
    digits = _digits(tiles)
    size: list[int] = []
    src: list[int] = []
    dst: list[int] = []
    reach = {weight: part.dst.offset // weight % extent for weight, extent, _ in digits}
    begin = tiles.offset + sum(reach[weight] * stride for weight, _, stride in digits)
    for count, ours, step in zip(part.src.size, part.src.stride, part.dst.stride, strict=True):
        pieces = _split(count, step, digits)
        if pieces is None:
            return None
        done = count
        for extent, weight, width, stride in pieces:  # outermost first
            done //= extent
            size.append(extent)
            src.append(ours * done)
            dst.append(width * stride)
            reach[weight] += (extent - 1) * width
    if any(reach[weight] >= extent for weight, extent, _ in digits):
        return None  # a digit would carry into the next
    return Correspondence(
        Layout(part.src.offset, tuple(size), tuple(src)), Layout(begin, tuple(size), tuple(dst))
    )


def _digits(tiles: Layout) -> list[tuple[int, int, int]]:
    """Weight, extent and stride of each digit of a block's positions, the lowest first."""
    found = []
    weight = 1
    for extent, stride in zip(reversed(tiles.size), reversed(tiles.stride), strict=True):
        found.append((weight, extent, stride))
        weight *= extent
    return found


def _split(
    count: int, step: int, digits: list[tuple[int, int, int]]
) -> list[tuple[int, int, int, int]] | None:
    """A dimension of `count` positions, `step` apart, along the digits.

    Extent, weight of the digit, width in that digit and stride there of each piece, the outermost first;
    none if a piece is not whole.
    """
    pieces: list[tuple[int, int, int, int]] = []
    for weight, extent, stride in digits:
        if count == 1:
            break
        if step >= weight * extent:
            continue
        width = step // weight
        if step % weight:
            return None
        taken = min(count, -(-extent // width))
        if count % taken or (count > taken and extent % width):
            return None
        pieces.insert(0, (taken, weight, width, stride))
        count //= taken
        step *= taken
    return pieces if count == 1 else None
