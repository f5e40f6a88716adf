"""Canvases: dense and single writes to packed blocks, against a plain tensor."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from loaders.engine.canvas import Canvases
from loaders.engine.layout import Layout
from loaders.engine.move import Move, Scatter

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


@given(writes)
def test_the_last_write_wins(sequence: list[tuple[str, str, int, list[int]]]) -> None:
    """Any sequence of writes leaves what making them one after the other leaves; untouched elements stay."""
    plain = {name: torch.full((BLOCK * BLOCKS,), -1) for name in "abc"}
    canvases = Canvases()
    for number, (kind, target, block, where) in enumerate(sequence):
        if kind == "put":
            target, positions = "c", torch.arange(block * BLOCK, (block + 1) * BLOCK)
        elif kind == "paint":
            inside = {position % BLOCK for position in where}
            positions = torch.tensor([block * BLOCK + position for position in inside])
        else:
            positions = torch.tensor(where)
        values = torch.arange(positions.numel()) + 100 * number
        plain[target][positions] = values
        if kind == "put":
            canvases.put(Move("c", Layout(block * BLOCK, (BLOCK,), (1,)), values))
        elif kind == "paint":
            canvases.paint(target, BLOCK, positions, values)
        else:
            canvases.scatter(target, BLOCK, positions.to(torch.int32), values)
    found = {name: torch.full((BLOCK * BLOCKS,), -1) for name in "abc"}
    for move in canvases.moves():
        move.write(found[move.target])
    assert all(torch.equal(found[name], plain[name]) for name in "abc")


def test_a_covered_block_leaves_as_one_move() -> None:
    """Two interleaved tensors of one expert become one contiguous write; a part of it, single elements."""
    canvases = Canvases()
    canvases.paint("a", 4, torch.tensor([4, 6]), torch.tensor([1, 3]))
    (part,) = canvases.moves()
    assert isinstance(part.place, Scatter) and part.place.positions.tolist() == [4, 6]
    canvases.paint("a", 4, torch.tensor([7, 5]), torch.tensor([4, 2]))
    (whole,) = canvases.moves()
    assert whole.place == Layout(4, (4,), (1,)) and whole.values.tolist() == [1, 2, 3, 4]


def test_blocks_beyond_32_bits() -> None:
    """Positions of an uncovered block that lies past 2**31 are kept in 64 bits."""
    canvases = Canvases()
    canvases.paint("a", 4, torch.tensor([2**31 + 1]), torch.tensor([1]))
    canvases.paint("a", 4, torch.tensor([1]), torch.tensor([1]))
    far, near = canvases.moves()
    assert isinstance(far.place, Scatter) and far.place.positions.tolist() == [2**31 + 1]
    assert isinstance(near.place, Scatter) and near.place.positions.dtype is torch.int32


def test_nothing_to_scatter_is_no_move() -> None:
    """Elements that all land on canvases, and none at all, leave no empty move."""
    canvases = Canvases()
    canvases.scatter("a", 4, torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int64))
    assert canvases.moves() == []
    canvases.paint("a", 4, torch.tensor([0]), torch.tensor([1]))
    canvases.scatter("a", 4, torch.tensor([0, 1]), torch.tensor([8, 9]))
    (move,) = canvases.moves()
    assert move.values.tolist() == [8, 9]
