"""Hands: moves that threads write side by side leave what writing them one after the other leaves."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import loaders.engine.hands
from loaders.engine.hands import Hands
from loaders.engine.layout import Layout
from loaders.engine.move import Move, Scatter

SIZE = 64


@pytest.fixture(scope="module")
def eager() -> Hands:
    """Three threads beside this one, on whatever cores there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders.engine.hands, "own_cores", lambda: {0, 1, 2, 3})
        patch.setattr(loaders.engine.hands, "all_cores", lambda: {0, 1, 2, 3})
        return Hands()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is worth the while."""
    monkeypatch.setattr(loaders.engine.hands, "_WORTH", 0)
    monkeypatch.setattr(loaders.engine.hands, "_PART", 8)


def move(target: str, where: list[int] | int, first: int) -> Move:
    """Single elements, or a row from `where` on, or every other element if it is odd."""
    if isinstance(where, list):
        place: Scatter | Layout = Scatter(torch.tensor(where, dtype=torch.int32))
        count = len(where)
    else:
        stride, count = (2, SIZE // 4) if where % 2 else (1, SIZE // 2)
        place = Layout(where, (count,), (stride,))
    return Move(target, place, torch.arange(first, first + count, dtype=torch.int16))


moves = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.one_of(
            st.integers(0, SIZE // 2),
            st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=SIZE, unique=True).map(sorted),
        ),
    ),
    min_size=1,
    max_size=6,
)


@given(moves)
def test_side_by_side_is_as_in_turn(eager: Hands, drawn: list[tuple[str, list[int] | int]]) -> None:
    """Whatever is written where, in parts or not, and under two names of one memory: the last one wins."""
    found, plain = ({}, {})
    for targets in (found, plain):
        targets["a"], targets["c"] = (torch.zeros(SIZE, dtype=torch.int16) for _ in range(2))
        targets["b"] = targets["a"].view(torch.bfloat16)
    made = [move(target, where, 1 + 100 * number) for number, (target, where) in enumerate(drawn)]
    eager.write(made, found)
    for one in made:
        one.write(plain[one.target])
    assert all(torch.equal(found[name], plain[name]) for name in "ac")


def test_parts_of_a_move(eager: Hands) -> None:
    """Parts have the bytes that were asked for, together the move's own; an interleaved one is not split."""
    row, dots, comb = move("a", 4, 0), move("a", list(range(0, 60, 3)), 0), move("a", 3, 0)
    assert [part.nbytes for part in row.parts(24)] == [24, 24, 16]
    assert [part.nbytes for part in dots.parts(16)] == [16, 16, 8]
    assert list(comb.parts(8)) == [comb]


def test_a_write_that_fails_is_told_when_all_have_ended(eager: Hands) -> None:
    """What is raised is the failure, whoever met it, and by then nobody writes any more."""
    for count in range(1, 6):
        targets = {name: torch.zeros(SIZE, dtype=torch.int16) for name in "ac"}
        targets["b"] = torch.zeros(SIZE, dtype=torch.int64)
        made = [*(move("a", 0, n) for n in range(count)), move("b", 0, 1), move("c", 0, 1)]
        with pytest.raises(ValueError, match="not in words of"):
            eager.write(made, targets)
        assert eager._pool._work_queue.empty()
        for target in targets.values():
            target.zero_()
        time.sleep(0.001)
        assert not any(target.any() for target in targets.values())
