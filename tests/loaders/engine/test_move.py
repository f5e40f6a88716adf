"""Moves: exact elements, exact bits, undo and compaction."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loaders.engine.layout import Layout
from loaders.engine.move import Move, Place, Scatter, bits_of, bytes_of, compacted, digest_of
from loaders.engine.planner import plan
from tests.loaders.engine.atlases import Body, simple

PLACES: list[Place] = [
    Layout(0, (12,), (1,)),
    Layout(2, (3,), (3,)),
    Layout(1, (2, 3), (1, 2)),
    Layout(5, (), ()),
    Layout(3, (0,), (1,)),
    Scatter(torch.tensor([3, 0, 11], dtype=torch.int32)),
    Scatter(torch.tensor([4, 5])),
]


@given(st.lists(st.sampled_from(range(len(PLACES))), max_size=8), st.integers(0, 2**32 - 1))
def test_undo_in_reverse_and_compacted(order: list[int], seed: int) -> None:
    """Overlapping moves in any order: the reverse of what was taken brings everything back, and so does
    its compaction, which holds each place once."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(12, generator=generator)
    first = flat.clone()
    taken: list[Move] = []
    for index in order:
        place = PLACES[index]
        count = place.numel if isinstance(place, Layout) else place.positions.numel()
        move = Move("t", place, bits_of(torch.randn(count, generator=generator)))
        taken.insert(0, move.taken_from(flat))
        move.write(flat)
    last = flat.clone()
    short = compacted(taken)
    assert len(short) == len(set(order))
    for moves in (taken, short):
        flat.copy_(last)
        for move in moves:
            move.write(flat)
        assert torch.equal(flat, first)


def test_writes_only_its_elements_in_a_part_of_a_storage() -> None:
    """The flat target may be a part of a larger storage; nothing around it changes."""
    storage = torch.zeros(20)
    flat = storage[4:16]
    for place in PLACES:
        storage.zero_()
        count = place.numel if isinstance(place, Layout) else place.positions.numel()
        Move("t", place, bits_of(torch.ones(count))).write(flat)
        assert int(storage.sum()) == int(flat.sum()) == count


def test_another_element_size_is_refused() -> None:
    """Bits of one size are never spread over elements of another."""
    with pytest.raises(ValueError, match="words"):
        Move("t", PLACES[0], bits_of(torch.zeros(12))).write(torch.zeros(12, dtype=torch.bfloat16))


def test_bytes_of_anything() -> None:
    """Scalars, empty tensors, bools and floats are their bytes; contiguous ones are not copied."""
    assert bytes_of(torch.tensor(1, dtype=torch.int16)).tobytes() == b"\x01\x00"
    assert bytes_of(torch.empty(0, 3)).nbytes == 0
    assert bytes_of(torch.tensor([True, False])).tobytes() == b"\x01\x00"
    flat = torch.zeros(2)
    view = bytes_of(flat)
    flat.fill_(1.0)
    assert view.tobytes() == torch.ones(2).numpy().tobytes()


def test_digest_tells_moves_apart(tmp_path: Path) -> None:
    """Other values, places, targets or orders give another digest; the same moves the same."""
    seen = set()
    for values, indices in [
        (torch.ones(4, 3), None),
        (torch.zeros(4, 3), None),
        (torch.ones(2), torch.tensor([0, 1])),
        (torch.ones(2), torch.tensor([0, 2])),
        (torch.ones(2), torch.tensor([0, 2])),
    ]:
        body = Body(tmp_path / "body")
        body.write("w", values, indices)
        seen.add(digest_of(plan(simple().atlas, (body.staged(),)).moves))
    assert len(seen) == 4
