"""Applying prepared moves, and taking them back from wherever it failed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loaders.engine.failpoints import Failpoints, Injected
from loaders.engine.hands import Hands
from loaders.engine.layout import Layout
from loaders.engine.move import Move, bits_of
from loaders.engine.planner import plan
from loaders.engine.prepared import Applied, NoWayBack, Prepared, taken
from tests.loaders.engine.atlases import Body, simple

HANDS = Hands()


def prepared(targets: dict[str, torch.Tensor], *moves: Move) -> Prepared:
    """As a session prepares it."""
    return Prepared("t", 0, moves, taken(moves, targets), (), 1, 12, "")


def test_a_failed_write_is_put_back(tmp_path: Path) -> None:
    """A move that fails in the middle leaves what can be reverted bit for bit, also when reverted twice."""
    hand = simple()
    hand.targets["q"] = torch.zeros(12, dtype=torch.float64)
    body = Body(tmp_path / "body")
    body.write("w", torch.ones(4, 3))
    (move,) = plan(hand.atlas, (body.staged(),)).moves
    wrong = Move("q", move.place, move.values)
    applied = Applied(prepared(hand.targets, move, wrong, move), hand.targets, HANDS)
    with pytest.raises(ValueError, match="not in words of"):
        applied.apply(Failpoints(0))
    assert hand.targets["p"].sum() == 12
    for _ in range(2):
        applied.revert()
        assert not hand.targets["p"].any() and not hand.targets["q"].any()


def test_what_was_prepared_without_undo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be reverted as long as nothing was written, and not after."""
    monkeypatch.setenv("GRAFT_FAILPOINTS", str(tmp_path))
    hand = simple()
    move = Move("p", Layout.contiguous((12,)), bits_of(torch.ones(12)))
    for point, written in (("apply.before", 0.0), ("apply.middle", 1.0)):
        applied = Applied(Prepared("t", 0, (move,) * 2, None, (), 1, 12, None), hand.targets, HANDS)
        (tmp_path / point).touch()
        with pytest.raises(Injected):
            applied.apply(Failpoints(0))
        assert hand.targets["p"].tolist() == [written] * 12
        if written:
            with pytest.raises(NoWayBack):
                applied.revert()
        else:
            applied.revert()


def test_a_revert_that_failed_goes_on() -> None:
    """What could not be put back at first is put back when it can be; nothing is taken twice."""
    hand = simple()
    place = Layout.contiguous((12,))
    moves = tuple(Move("p", place, bits_of(torch.full((12,), float(n)))) for n in (1, 2))
    applied = Applied(prepared(hand.targets, *moves), hand.targets, HANDS)
    applied.apply(Failpoints(0))
    flat = hand.targets.pop("p")
    with pytest.raises(KeyError):
        applied.revert()
    hand.targets["p"] = flat
    applied.revert()
    assert not flat.any()


@pytest.mark.parametrize("point", ["apply.before", "apply.middle", "apply.after"])
def test_failpoints_of_an_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """Before, in the middle and after the write: reverted, and the next apply goes through."""
    monkeypatch.setenv("GRAFT_FAILPOINTS", str(tmp_path))
    hand = simple()
    place = Layout.contiguous((12,))
    moves = tuple(Move("p", place, bits_of(torch.full((12,), float(n)))) for n in (1, 2))
    ready = prepared(hand.targets, *moves)
    (tmp_path / point).touch()
    applied = Applied(ready, hand.targets, HANDS)
    with pytest.raises(Injected, match=point):
        applied.apply(Failpoints(0))
    written = {"apply.before": 0.0, "apply.middle": 1.0, "apply.after": 2.0}[point]
    assert hand.targets["p"].tolist() == [written] * 12
    applied.revert()
    assert not hand.targets["p"].any()
    Applied(ready, hand.targets, HANDS).apply(Failpoints(0))
    assert hand.targets["p"].tolist() == [2.0] * 12


def test_spares_are_exchanged_last_and_first_back() -> None:
    """Handles go in after the moves and come out before them; one that fails is not taken back."""
    log: list[str] = []

    def spare(name: str, fails: bool = False) -> Any:
        def exchange() -> None:
            if fails:
                raise ValueError(name)
            log.append(name)

        return SimpleNamespace(exchange=exchange, nbytes=8)

    applied = Applied(
        Prepared("t", 0, (), (), (spare("a"), spare("b"), spare("c", True)), 0, 0, ""), {}, HANDS
    )
    assert applied.prepared.held_nbytes == 24
    with pytest.raises(ValueError, match="c"):
        applied.apply(Failpoints(0))
    applied.revert()
    applied.revert()
    assert log == ["a", "b", "b", "a"]
