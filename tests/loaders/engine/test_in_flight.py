"""What a commit does with requests that run, in each mode and over every way in which it can go wrong."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from loaders.engine.commit import Commit
from loaders.engine.in_flight import MixedCache
from loaders.engine.rpc_client import Workers
from schemas.bridge import CommitRequest, CommitResult, Outcome
from schemas.problems import Code
from schemas.transactions import InFlight
from tests.loaders.engine.engines import Engine, Ranks

pytestmark = pytest.mark.anyio

BROKEN = RuntimeError("broken")


def made(engine: Engine, mode: str, drain_timeout_s: float = 5.0) -> Commit:
    request = CommitRequest(
        nonce="n", key="k", version=7, in_flight=InFlight(mode), drain_timeout_s=drain_timeout_s
    )
    return Commit(engine, Workers(engine), request)


async def commit(engine: Engine, mode: str, drain_timeout_s: float = 5.0) -> CommitResult:
    return await made(engine, mode, drain_timeout_s).run()


def check_not_begun(engine: Engine, result: CommitResult, code: Code) -> None:
    """No rank was asked to write, and the code says why."""
    assert (result.outcome, result.code) == (Outcome.FAILED, code) and result.detail
    assert "graft_apply" not in engine.log and engine.ranks.version == [0, 0]
    assert engine.weight_version == "0"


@pytest.mark.parametrize(("mode", "fate"), [("recompute", "recomputed"), ("abort", "aborted")])
async def test_modes_that_do_not_wait(mode: str, fate: str) -> None:
    """The engine is paused in that mode, changed, its caches reset, and goes on."""
    engine = Engine(Ranks())
    result = await commit(engine, mode)
    assert (result.outcome, result.in_flight, result.code) == (Outcome.DONE, fate, None)
    assert engine.log[1] == ("pause abort" if mode == "abort" else "pause")
    assert result.caches["prefix"] == result.caches["encoder"] == "reset"
    assert engine.log[-2:] == ["resume", "graft_settle"] and not engine.paused


async def test_wait_writes_only_after_the_last_request() -> None:
    """Nothing is written while requests run; then all is as ever."""
    engine = Engine(Ranks())
    task = asyncio.create_task(commit(engine, "wait"))
    await asyncio.sleep(0.05)
    assert engine.log == ["asleep?", "pause wait"]
    engine.drained.set()
    result = await task
    assert (result.outcome, result.in_flight) == (Outcome.DONE, "finished")
    assert engine.log[2:] == ["graft_apply", "prefix", "mm", "encoder", "stamp", "resume", "graft_settle"]
    assert engine.ranks.version == [7, 7]


async def test_wait_is_bounded() -> None:
    """Requests that run on end the commit, not the other way round: nothing written, and it resumes."""
    engine = Engine(Ranks())
    result = await commit(engine, "wait", drain_timeout_s=0.02)
    check_not_begun(engine, result, Code.DRAIN_TIMEOUT)
    assert "0.02" in (result.detail or "")
    assert engine.log[1:] == ["pause wait", "pause", "resume", "graft_settle"] and not engine.paused


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_a_pause_that_fails(mode: str) -> None:
    """Nothing was written, and it resumes, in case half of the pause took effect."""
    engine = Engine(Ranks())
    engine.faults[f"pause {mode}"] = BROKEN
    result = await commit(engine, mode)
    assert result.outcome is Outcome.FAILED and "broken" in (result.detail or "") and result.code is None
    assert engine.log[-2:] == ["resume", "graft_settle"] and engine.ranks.version == [0, 0]


@pytest.mark.parametrize("mode", list(InFlight))
@pytest.mark.parametrize("fault", ["graft_apply", "prefix", "stamp"])
async def test_a_failure_resumes_in_every_mode(mode: InFlight, fault: str) -> None:
    """A rank, cache or stamp that fails is undone, and generation goes on."""
    engine = Engine(Ranks())
    engine.drained.set()
    if fault == "graft_apply":
        engine.ranks.behave("graft_apply", 1, engine.ranks.error("internal"))
    else:
        engine.faults[fault] = False if fault == "prefix" else BROKEN
    commit = made(engine, mode)
    result = await commit.run()
    assert result.outcome is Outcome.FAILED and engine.ranks.version == [0, 0]
    assert "graft_undo" in engine.log and not engine.paused and engine.weight_version == "0"
    assert commit.mixed is None


@pytest.mark.parametrize("mode", list(InFlight))
async def test_unknown_stays_paused_in_every_mode(mode: InFlight) -> None:
    """The one way out on which generation is not resumed."""
    engine = Engine(Ranks())
    engine.drained.set()
    engine.ranks.behave("graft_apply", 0, engine.ranks.error("state_unknown"))
    result = await commit(engine, mode)
    assert result.outcome is Outcome.UNKNOWN and engine.paused and "resume" not in engine.log


async def test_keep_leaves_the_caches_to_running_requests() -> None:
    """Caches are mixed as long as a request that any rank holds goes on; nothing is reset in the pause."""
    engine = Engine(Ranks(), connector=True)
    engine.ranks.requests = [{"a"}, {"a", "b"}]
    commit = made(engine, "keep")
    result = await commit.run()
    assert (result.outcome, result.in_flight) == (Outcome.DONE, "kept")
    assert result.caches == {"prefix": "mixed", "connector": "mixed", "encoder": "none"}
    assert engine.log == [
        *("asleep?", "pause", "graft_apply", "graft_running", "stamp", "resume", "graft_settle")
    ]
    assert commit.mixed is not None


async def test_keep_on_an_idle_engine_resets_at_once() -> None:
    """With nobody to keep anything for, the caches are reset as in every mode."""
    engine = Engine(Ranks())
    commit = made(engine, "keep")
    result = await commit.run()
    assert result.caches["prefix"] == "reset" and result.in_flight == "kept" and commit.mixed is None


async def test_keep_needs_every_ranks_word() -> None:
    """A rank that does not say what runs leaves it open what the cache holds: undone."""
    engine = Engine(Ranks())
    engine.ranks.behave("graft_running", 1, engine.ranks.error("internal"))
    result = await commit(engine, "keep")
    assert result.outcome is Outcome.FAILED and "graft_undo" in engine.log and not engine.paused


@pytest.mark.parametrize(("method", "code"), [("eagle3", Code.DRAFT_MODEL), ("ngram", None)])
async def test_a_draft_model_is_refused(method: str, code: Code | None) -> None:
    """Its weights would stay old; speculation without a model is fine."""
    engine = Engine(Ranks())
    engine.vllm_config.speculative_config = SimpleNamespace(method=method)
    result = await commit(engine, "recompute")
    if code is None:
        assert result.outcome is Outcome.DONE
    else:
        check_not_begun(engine, result, code)
        assert engine.log == []


@pytest.mark.parametrize("how", ["sleeping", "paused"])
async def test_an_engine_that_stands_still_is_refused(how: str) -> None:
    """Whoever put it to sleep or paused it wakes it: it is neither touched nor resumed."""
    engine = Engine(Ranks())
    setattr(engine, how, True)
    result = await commit(engine, "recompute")
    check_not_begun(engine, result, Code.ENGINE_ASLEEP)
    assert engine.log == ["asleep?"] and engine.paused == (how == "paused")


async def test_an_engine_that_does_not_say_whether_it_sleeps() -> None:
    """Nothing is paused or written on a guess."""
    engine = Engine(Ranks())
    engine.faults["asleep?"] = BROKEN
    result = await commit(engine, "recompute")
    assert result.outcome is Outcome.FAILED and engine.log == ["asleep?"]


async def test_keep_is_refused_for_multimodal_models() -> None:
    """Their encoder cache can't be reset beside running requests; other modes work."""
    engine = Engine(Ranks())
    engine.vllm_config.model_config.is_multimodal_model = True
    check_not_begun(engine, await commit(engine, "keep"), Code.NOT_SUPPORTED)
    assert (await commit(engine, "recompute")).outcome is Outcome.DONE


class Clearing:
    """A mixed cache that is being cleared, version 7, kept for the request `old`."""

    def __init__(self, **bounds: Any) -> None:
        self.engine = Engine(Ranks())
        self.engine.ranks.version = [7, 7]
        self.engine.ranks.requests = [{"old"}, {"old", "young"}]
        mixed = MixedCache(self.engine, Workers(self.engine), 7, frozenset({"old"}))
        self.task = asyncio.create_task(mixed.clear(**({"poll_s": 0.001} | bounds)))

    @property
    def resets(self) -> int:
        return self.engine.log.count("prefix")

    async def ended(self) -> None:
        await asyncio.wait_for(self.task, 5)

    def end_old(self) -> None:
        for requests in self.engine.ranks.requests:
            requests.discard("old")


async def test_the_cache_is_reset_when_the_last_old_request_has_ended() -> None:
    """Not before, and once; younger requests do not hold it up."""
    clearing = Clearing()
    await asyncio.sleep(0.03)
    clearing.engine.ranks.requests[0].clear()
    await asyncio.sleep(0.03)
    assert clearing.resets == 0
    clearing.end_old()
    await clearing.ended()
    assert clearing.resets == 1 and clearing.engine.ranks.requests[1] == {"young"}


@pytest.mark.parametrize("fault", [False, BROKEN])
async def test_a_reset_that_fails_is_tried_again(fault: object) -> None:
    """As when blocks are still being freed."""
    clearing = Clearing()
    clearing.engine.faults["prefix"] = fault
    clearing.end_old()
    await asyncio.sleep(0.03)
    assert clearing.resets > 1 and not clearing.task.done()
    clearing.engine.faults.clear()
    await clearing.ended()


async def test_a_later_commit_takes_over() -> None:
    """It has reset the cache or keeps it for its own requests: this one resets nothing."""
    clearing = Clearing()
    clearing.engine.ranks.version = [8, 8]
    clearing.end_old()
    await clearing.ended()
    assert clearing.resets == 0


async def test_a_commit_in_its_pause_takes_nothing_over() -> None:
    """It may yet be undone, and then the cache is still to be reset."""
    clearing = Clearing()
    clearing.engine.ranks.version = [8, 8]
    clearing.engine.paused = True
    await asyncio.sleep(0.03)
    assert not clearing.task.done()
    clearing.engine.ranks.version = [7, 7]
    clearing.engine.paused = False
    clearing.end_old()
    await clearing.ended()
    assert clearing.resets == 1


async def test_waiting_for_old_requests_is_bounded() -> None:
    """A request that runs for ever is computed again in the end."""
    clearing = Clearing(longest_s=0.05)
    await clearing.ended()
    assert clearing.resets == 1
