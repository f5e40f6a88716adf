"""Hands: moves that threads write side by side leave what writing them one after the other leaves."""

import threading
import time
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

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


@dataclass(frozen=True)
class Slow:
    """A move of one target that is written when it may be."""

    target: str
    may: threading.Event
    log: list[str]
    fault: type[Exception] | None = None
    nbytes: int = 8

    def parts(self, nbytes: int) -> list["Slow"]:
        return [self]

    def write(self, flat: torch.Tensor) -> None:
        self.may.wait(10)
        if self.fault:
            raise self.fault(self.target)
        self.log.append(self.target)


def test_a_write_that_fails_is_told_when_all_have_ended(eager: Hands) -> None:
    """Nobody writes any more when the failure is raised; what was not begun is not written."""
    log: list[str] = []
    ready, later = threading.Event(), threading.Event()
    ready.set()
    made: list[Any] = [Slow(name, later, log) for name in "ab"]
    made += [Slow("c", ready, log, KeyError), *(Slow(name, later, log) for name in "defgh")]
    threading.Timer(0.05, later.set).start()
    with pytest.raises(KeyError):
        eager.write(made, {name: torch.zeros(1) for name in "abcdefgh"})
    written = list(log)
    time.sleep(0.05)
    assert log == written and len(written) < 7


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others end first, and what it would have taken is not written when one is started later."""
    with monkeypatch.context() as patch:
        patch.setattr(loaders.engine.hands, "own_cores", lambda: {0, 1, 2, 3})
        patch.setattr(loaders.engine.hands, "all_cores", lambda: {0, 1, 2, 3})
        hands = Hands()
    log: list[str] = []
    go = threading.Event()
    go.set()
    made: list[Any] = [Slow(name, go, log) for name in "abcd"]
    targets = {name: torch.zeros(1) for name in "abcd"}
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="can't start"):
            hands.write(made, targets)
    assert log == []
    hands.write(made[:2], targets)
    assert sorted(log) == ["a", "b"]
