"""The pause of a commit, over every way in which it can go wrong."""

import asyncio

import pytest

from loaders.engine.commit import Commit
from loaders.engine.rpc_client import Workers
from schemas.bridge import CommitRequest, CommitResult, Outcome
from schemas.problems import Code
from tests.loaders.engine.engines import Engine, Ranks

BROKEN = RuntimeError("broken")


def commit(engine: Engine) -> CommitResult:
    request = CommitRequest(nonce="n", key="k", version=7)
    return asyncio.run(Commit(engine, Workers(engine), request).run())


def check_undone(engine: Engine, result: CommitResult) -> None:
    """Nothing is left of the commit, and the engine serves."""
    assert result.outcome is Outcome.FAILED
    assert engine.ranks.version == [0] * engine.ranks.count
    assert not engine.paused and engine.weight_version == "0"
    assert engine.log[-2:] == ["resume", "graft_settle"]


def check_unknown(engine: Engine, result: CommitResult) -> None:
    """The outcome says so, with a reason, and generation was not resumed."""
    assert result.outcome is Outcome.UNKNOWN and result.detail
    assert engine.paused and "resume" not in engine.log


@pytest.mark.parametrize("connector", [False, True])
def test_done(connector: bool) -> None:
    """Pause, apply, caches, stamp, resume, settle, in this order, once each."""
    engine = Engine(Ranks(), connector)
    result = commit(engine)
    assert result.outcome is Outcome.DONE and result.in_flight == "recomputed" and result.detail is None
    assert engine.log == [
        "asleep?",
        "pause",
        "graft_apply",
        "prefix",
        "mm",
        "encoder",
        "stamp",
        "resume",
        "graft_settle",
    ]
    assert engine.weight_version == "7" and engine.ranks.version == [7, 7] and not engine.paused
    assert result.caches == {
        "prefix": "reset",
        "encoder": "reset",
        "connector": "reset" if connector else "none",
    }
    assert [(report.ok, report.nonce) for report in result.ranks] == [(True, "n")] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_apply_error_on_one_rank(rank: int) -> None:
    """The other rank is undone; the report says which rank failed and why."""
    engine = Engine(Ranks())
    engine.ranks.behave("graft_apply", rank, engine.ranks.error("internal", "no room"))
    result = commit(engine)
    check_undone(engine, result)
    assert [report.ok for report in result.ranks] == [rank != 0, rank != 1]
    error = result.ranks[rank].error
    assert error is not None and error.code is Code.INTERNAL and error.detail == "no room"
    assert {report.nonce for report in result.ranks} == {"n"}
    assert "prefix" not in engine.log and result.caches == {} and result.in_flight == "kept"


@pytest.mark.parametrize("rank", [0, 1])
def test_undo_error(rank: int) -> None:
    """A rank that cannot undo leaves the state unknown and the engine paused."""
    engine = Engine(Ranks())
    engine.ranks.behave("graft_apply", 1, engine.ranks.error("internal"))
    engine.ranks.behave("graft_undo", rank, engine.ranks.error("state_unknown", "lost"))
    result = commit(engine)
    check_unknown(engine, result)
    error = result.ranks[rank].error
    assert error is not None and error.detail == "lost"


def test_a_rank_that_could_not_revert() -> None:
    """`state_unknown` from an apply is final: no undo is tried and nothing resumes."""
    engine = Engine(Ranks())
    engine.ranks.behave("graft_apply", 0, engine.ranks.error("state_unknown"))
    check_unknown(engine, commit(engine))
    assert "graft_undo" not in engine.log


@pytest.mark.parametrize(
    ("step", "fault"),
    [("prefix", False), ("prefix", BROKEN), ("mm", BROKEN), ("encoder", BROKEN), ("stamp", BROKEN)],
)
def test_caches_and_stamp_are_part_of_it(step: str, fault: object) -> None:
    """A cache that is not reset, or a version that is not stamped, undoes the commit."""
    engine = Engine(Ranks())
    engine.faults[step] = fault
    result = commit(engine)
    check_undone(engine, result)
    assert "graft_undo" in engine.log and result.detail
    if step == "prefix":
        assert result.caches["prefix"] == "failed" and result.in_flight == "kept"


def test_failing_caches_and_failing_undo() -> None:
    """Two failures in a row are unknown."""
    engine = Engine(Ranks())
    engine.faults["prefix"] = BROKEN
    engine.ranks.behave("graft_undo", 0, engine.ranks.error("state_unknown"))
    check_unknown(engine, commit(engine))


def test_pause_raises() -> None:
    """Nothing was written yet: failed, not unknown, and resume is tried in case half of it took effect."""
    engine = Engine(Ranks())
    engine.faults["pause"] = BROKEN
    result = commit(engine)
    check_undone(engine, result)
    assert "graft_apply" not in engine.log and "broken" in (result.detail or "")


@pytest.mark.parametrize("method", ["graft_apply", "graft_undo"])
@pytest.mark.parametrize(
    "answer",
    [
        lambda rank, nonce, *rest: '{"nonce": "earlier", "rank": 1, "boot": "b1"}',
        lambda rank, nonce, *rest: "not an answer",
        lambda rank, nonce, *rest: None,
    ],
    ids=["of another call", "no JSON", "nothing"],
)
def test_an_answer_that_is_none(method: str, answer: object) -> None:
    """A rank whose answer belongs to another call, or is none, may have written anything."""
    engine = Engine(Ranks())
    if method == "graft_undo":
        engine.ranks.behave("graft_apply", 0, engine.ranks.error("internal"))
    engine.ranks.behave(method, 1, answer)  # type: ignore[arg-type]  # also what no rank should answer
    check_unknown(engine, commit(engine))


@pytest.mark.parametrize("method", ["graft_apply", "graft_undo"])
def test_the_engine_dies(method: str) -> None:
    """An RPC that raises leaves the state unknown."""
    engine = Engine(Ranks())
    engine.ranks.behave("graft_apply", 0, engine.ranks.error("internal"))
    engine.faults[method] = BROKEN
    check_unknown(engine, commit(engine))


@pytest.mark.parametrize("fails", [False, True])
def test_resume_raises(fails: bool) -> None:
    """An engine that does not go on is reported as unknown, so that it is replaced."""
    engine = Engine(Ranks())
    engine.faults["resume"] = BROKEN
    if fails:
        engine.ranks.behave("graft_apply", 0, engine.ranks.error("internal"))
    result = commit(engine)
    assert result.outcome is Outcome.UNKNOWN and "broken" in (result.detail or "")
    assert len(result.ranks) == 2


def test_settle_raises() -> None:
    """What is not tidied up does not change that the commit is done."""
    engine = Engine(Ranks())
    engine.faults["graft_settle"] = BROKEN
    result = commit(engine)
    assert result.outcome is Outcome.DONE and engine.weight_version == "7" and not engine.paused


def test_one_rank_alone() -> None:
    """The reports are in the order of ranks, whatever the order of answers."""
    engine = Engine(Ranks(3))
    order = engine.ranks.call
    engine.ranks.call = lambda method, nonce, *rest: order(method, nonce, *rest)[::-1]  # type: ignore[method-assign]
    assert [report.rank for report in commit(engine).ranks] == [0, 1, 2]
