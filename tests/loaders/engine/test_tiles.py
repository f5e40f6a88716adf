"""Tiles: kernels' orders as strides, and copies through them, against tables of positions."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loaders.engine.layout import Correspondence, Layout
from loaders.engine.spot import Spot
from loaders.engine.tiles import strided, through

TILED = torch.arange(4 * 6 * 8).view(4, 6, 8).permute(1, 0, 2).reshape(-1)


def test_regular_tables_are_layouts() -> None:
    """Tiles of a transposed matrix are found as strides; tables of no such order are not."""
    for table in (TILED, TILED.argsort(), torch.arange(12) * 2 + 3):
        layout = strided(table)
        assert layout is not None and layout.positions().tolist() == table.tolist()
    swapped = TILED.clone()
    swapped[[-1, -2]] = TILED[[-2, -1]]
    shuffled = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    for table in (shuffled, swapped, torch.tensor([3, 2, 1, 0])):
        assert strided(table) is None


@st.composite
def parts(draw: st.DrawFn) -> tuple[torch.Tensor, Correspondence]:
    """A block's table in some order of tiles, and a part of the block from values in any order."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    table = torch.arange(prod(shape)).view([shape[axis] for axis in order])
    table = table.permute([order.index(axis) for axis in range(len(shape))]).reshape(-1)
    rows = draw(st.sampled_from([n for n in range(1, prod(shape) + 1) if prod(shape) % n == 0]))
    block = torch.arange(prod(shape)).view(rows, -1)
    spans = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in block.shape]
    steps = [draw(st.integers(1, 3)) for _ in block.shape]
    (top, bottom), (left, right) = spans
    view = block[top : bottom : steps[0], left : right : steps[1]]
    size = tuple(view.shape)
    source = Layout.contiguous(size) if draw(st.booleans()) else Layout(0, size, (1, max(size[0], 1)))
    return table, Correspondence(source, Layout.of(view))


@given(parts())
def test_a_copy_through_tiles(case: tuple[torch.Tensor, Correspondence]) -> None:
    """Each element of whatever part of a block stands where the table says, and no other is touched."""
    regular, part = case
    values = torch.arange(100, 100 + max(part.src.end, 1))
    for table in (regular, regular.flip(0)):
        plain, found = (torch.full((table.numel(),), -1) for _ in range(2))
        plain[table[part.dst.positions()]] = values[part.src.positions()]
        Spot("a", table.numel(), table.numel(), table.to(torch.int32)).lay(part, values, found)
        assert torch.equal(found, plain)


TRANSPOSED = Correspondence(Layout(0, (8, 6), (1, 8)), Layout(0, (8, 6), (6, 1)))
"""What a checkpoint has as [6, 8] and a parameter as [8, 6]."""


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (TRANSPOSED, ((2, 4, 6), (4, 1, 8), (24, 1, 4))),
        (Correspondence(Layout(0, (24,), (1,)), Layout(24, (24,), (1,))), ((4, 6), (6, 1), (1, 4))),
    ],
    ids=["all of it, transposed", "its second half"],
)
def test_kernels_orders_are_reached_in_one_copy(
    part: Correspondence, expected: tuple[tuple[int, ...], ...]
) -> None:
    """Rows in tiles of four, with four rows side by side, as vLLM packs experts for the CPU."""
    table = torch.arange(48).view(2, 6, 4).permute(0, 2, 1).reshape(-1)
    tiles = strided(table)
    assert tiles is not None
    led = through(part, tiles)
    assert led is not None
    assert (led.src.size, led.src.stride, led.dst.stride) == expected


def test_steps_that_carry_are_left_to_the_table() -> None:
    """A part that begins within a tile and crosses its edge is no one strided copy."""
    tiles = strided(TILED)
    assert tiles is not None
    assert through(Correspondence(Layout(0, (8,), (1,)), Layout(4, (8,), (1,))), tiles) is None
