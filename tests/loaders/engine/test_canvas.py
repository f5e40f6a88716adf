"""Canvases: dense and single writes to packed blocks, against a plain tensor."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from loaders.engine.canvas import Canvases, scattered
from loaders.engine.layout import Correspondence, Layout
from loaders.engine.move import Move, Scatter
from loaders.engine.points import Points
from loaders.engine.spot import Spot

BLOCK, BLOCKS = 4, 3
writes = st.lists(
    st.tuples(
        st.sampled_from(["paint", "scatter", "put"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, BLOCKS - 1),
        st.lists(st.integers(0, BLOCK * BLOCKS - 1), min_size=1, unique=True),
    ),
    max_size=10,
)


TABLE = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
SPOT = Spot("a", BLOCK, BLOCK, TABLE)
"""Every block is permuted."""
PADDED = Spot("a", BLOCK, BLOCK + 2, TABLE)
"""Every block is permuted and followed by two constants."""


def row(begin: int, count: int) -> Correspondence:
    """The first `count` values go to as many elements from `begin`."""
    return Correspondence(Layout(0, (count,), (1,)), Layout(begin, (count,), (1,)))


def scatter(
    canvases: Canvases, target: str, spot: Spot, elements: torch.Tensor, values: torch.Tensor
) -> None:
    """Single elements as the planner has them written."""
    left, bits = canvases.dot(target, spot, elements, values)
    points = Points(left.numel(), spot.reach(BLOCK * BLOCKS), bits.dtype)
    points.add(spot.positions(left), bits)
    canvases.put(scattered(target, points))


@given(writes, st.sampled_from([SPOT, PADDED]))
def test_the_last_write_wins(sequence: list[tuple[str, str, int, list[int]]], spot: Spot) -> None:
    """Any sequence of writes leaves what making them one after the other leaves; nothing else is touched."""
    size = spot.dst_block * BLOCKS
    plain = {name: torch.full((size,), -1) for name in "abc"}
    canvases = Canvases()
    for number, (kind, target, block, where) in enumerate(sequence):
        if kind == "put":
            values = torch.arange(BLOCK) + 100 * number
            plain["c"][block * BLOCK : (block + 1) * BLOCK] = values
            canvases.put(Move("c", Layout(block * BLOCK, (BLOCK,), (1,)), values))
            continue
        if kind == "paint":
            begin = where[0] % BLOCK
            elements = torch.arange(begin, BLOCK) + block * BLOCK
        else:
            elements = torch.tensor(where)
        values = torch.arange(elements.numel()) + 100 * number
        plain[target][spot.positions(elements)] = values
        if kind == "paint":
            canvases.paint(target, spot, row(int(elements[0]), elements.numel()), values)
        else:
            scatter(canvases, target, spot, elements, values)
    found = {name: torch.full((size,), -1) for name in "abc"}
    for move in canvases.moves():
        move.write(found[move.target])
    assert all(torch.equal(found[name], plain[name]) for name in "abc")


def test_a_covered_block_leaves_as_one_move() -> None:
    """Two tensors of one expert become one write in kernel order; a part of it, single elements."""
    canvases = Canvases()
    canvases.paint("a", SPOT, row(4, 2), torch.tensor([1, 2]))
    (part,) = canvases.moves()
    assert isinstance(part.place, Scatter) and part.place.positions.tolist() == [4, 6]
    canvases.paint("a", SPOT, row(6, 2), torch.tensor([3, 4]))
    (whole,) = canvases.moves()
    assert whole.place == Layout(4, (4,), (1,)) and whole.values.tolist() == [2, 4, 1, 3]


def test_transposed_values_are_painted_in_place() -> None:
    """A transposed source lands transposed, as strides say."""
    canvases = Canvases()
    part = Correspondence(Layout(0, (2, 2), (1, 2)), Layout(0, (2, 2), (2, 1)))
    canvases.paint("a", Spot("a", BLOCK, BLOCK, torch.arange(4, dtype=torch.int32)), part, torch.arange(4))
    (move,) = canvases.moves()
    assert move.values.tolist() == [0, 2, 1, 3]


def test_blocks_beyond_32_bits() -> None:
    """Positions of an uncovered block that lies past 2**31 are kept in 64 bits."""
    canvases = Canvases()
    canvases.paint("a", SPOT, row(2**31, 1), torch.tensor([1]))
    canvases.paint("a", SPOT, row(1, 1), torch.tensor([1]))
    far, near = canvases.moves()
    assert isinstance(far.place, Scatter) and far.place.positions.tolist() == [2**31 + 2]
    assert isinstance(near.place, Scatter) and near.place.positions.dtype is torch.int32


def test_what_lies_on_canvases_is_not_left() -> None:
    """Elements that all land on canvases, and none at all, leave nothing over."""
    canvases = Canvases()
    none = torch.empty(0, dtype=torch.int64)
    assert all(one.numel() == 0 for one in canvases.dot("a", SPOT, none, none))
    canvases.paint("a", SPOT, row(0, 1), torch.tensor([1]))
    left, _ = canvases.dot("a", SPOT, torch.tensor([0, 1]), torch.tensor([8, 9]))
    assert left.numel() == 0
    (move,) = canvases.moves()
    assert move.values.tolist() == [9, 8]
