"""What became of a prepare or a commit: every rank's answer is looked at."""

import asyncio
import contextlib
from collections.abc import Mapping

from app.engine import EngineLost, EngineUnreachable, Work
from app.link import EngineLink, boots_of
from app.transactions import Prepared
from schemas import bridge
from schemas.bridge import Outcome, RankReport
from schemas.problems import STATUS, Code, ProblemError
from schemas.transactions import RECOMPUTE, FlightOptions

_SETTLE_STEP_S = 0.05


class NotBegun(ProblemError):
    """The engine did not begin with a commit: no weight was written, and it may be asked again."""


async def prepare(link: EngineLink, key: str, base: int, work: Work) -> Prepared:
    """Phase one on every rank. Raises what the ranks agree on, prepare_failed, engine_unavailable."""
    boots = link.require().boots
    try:
        result = await link.client.prepare(key, base, work)
        _judge_prepare(result, boots)
    except ProblemError as error:
        if error.code is Code.STATE_UNKNOWN:
            link.mark_unknown(error.detail, boots)
        else:
            await drop(link, key)
        raise
    return Prepared(key, base, result)


async def drop(link: EngineLink, key: str) -> None:
    """Let go of prepared work if the engine listens; it is bounded and named, so a leftover does no harm."""
    with contextlib.suppress(ProblemError):
        await link.client.drop(key)


async def commit(
    link: EngineLink,
    boots: Mapping[int, str],
    prepared: Prepared,
    version: int,
    flight: FlightOptions = RECOMPUTE,
) -> bridge.CommitResult:
    """Phase two on every rank of `boots`.

    Raises EngineUnreachable (never asked), NotBegun, commit_undone (every rank runs the
    old version), state_unknown.
    """
    with link.committing():
        try:
            result = await link.client.commit(prepared.key, version, flight)
        except EngineUnreachable:
            raise
        except ProblemError as error:
            return await settle(link, boots, prepared, version, error, flight)
        return _judge_commit(result, boots)


def _judge_prepare(result: bridge.PrepareResult, boots: Mapping[int, str]) -> None:
    if _foreign(result.ranks, boots):
        raise ProblemError(Code.ENGINE_UNAVAILABLE, "The engine was restarted meanwhile.")
    failed = [rank for rank in result.ranks if not rank.ok]
    if result.outcome is Outcome.DONE and not failed and len(result.ranks) == len(boots):
        return
    ranks = _per_rank(result.ranks)
    code = _shared_refusal(failed)
    if code is not None and failed[0].error is not None:
        raise ProblemError(code, failed[0].error.detail, ranks=ranks)
    raise ProblemError(Code.PREPARE_FAILED, "Not every rank could prepare; nothing was changed.", ranks=ranks)


def _judge_commit(result: bridge.CommitResult, boots: Mapping[int, str]) -> bridge.CommitResult:
    if result.outcome is Outcome.FAILED and result.code is not None:
        raise NotBegun(result.code, result.detail or "Nothing was written.")
    ranks = _per_rank(result.ranks)
    complete = {rank.rank for rank in result.ranks} == set(boots) and all(rank.ok for rank in result.ranks)
    if _foreign(result.ranks, boots):
        raise ProblemError(Code.STATE_UNKNOWN, "A rank was restarted during the commit.", ranks=ranks)
    if result.outcome is Outcome.FAILED:
        detail = result.detail or "Every rank runs the old version."
        raise ProblemError(Code.COMMIT_UNDONE, detail, ranks=ranks, caches=result.caches)
    if result.outcome is Outcome.DONE and complete and "failed" not in result.caches.values():
        return result
    detail = result.detail or "Not every rank confirmed the commit or its undoing; restart the engine."
    raise ProblemError(Code.STATE_UNKNOWN, detail, ranks=ranks, caches=result.caches)


async def settle(
    link: EngineLink,
    boots: Mapping[int, str],
    prepared: Prepared,
    version: int,
    cause: ProblemError,
    flight: FlightOptions,
) -> bridge.CommitResult:
    """Find out how a commit ended whose answer was lost; every rank has to say the same.

    Raises commit_undone, state_unknown.
    """
    clock = asyncio.get_running_loop().time
    idle_since = begun = clock()
    settle_s = link.settle_s + link.client.drain_s(flight)
    while clock() - begun < settle_s:
        state = await _ask(link)
        if state is not None and boots_of(state) != boots:
            break
        if state is None or state.paused:
            idle_since = clock()
        elif all(rank.version == version for rank in state.ranks):
            return _reconstructed(prepared)
        elif all(_untouched(rank, prepared) for rank in state.ranks):
            # Nothing is prepared any more, so no late arrival can commit it.
            detail = f"{cause.detail} Every rank still runs version {prepared.base}."
            raise ProblemError(Code.COMMIT_UNDONE, detail, ranks=_per_rank(prepared.result.ranks))
        elif clock() - idle_since > link.settle_s / 2:
            # The engine has been seen to do nothing for long: the question was lost on its way.
            # Sooner, this could meet a commit that has begun and take away what undoes it.
            await drop(link, prepared.key)
        await asyncio.sleep(_SETTLE_STEP_S)
    detail = f"{cause.detail} What it runs could not be found out; restart the engine."
    raise ProblemError(Code.STATE_UNKNOWN, detail)


def _untouched(rank: bridge.RankState, prepared: Prepared) -> bool:
    return rank.version == prepared.base and prepared.key not in rank.prepared


async def _ask(link: EngineLink) -> bridge.EngineState | None:
    try:
        return await link.client.state()
    except (EngineUnreachable, EngineLost):
        return None


def _reconstructed(prepared: Prepared) -> bridge.CommitResult:
    return bridge.CommitResult(
        outcome=Outcome.DONE,
        ranks=prepared.result.ranks,
        pause_ms=0.0,
        apply_ms=0.0,
        resume_ms=0.0,
        caches={},
        in_flight="unknown",
        detail="The engine's answer was lost; every rank reports the new version.",
    )


def _foreign(ranks: tuple[RankReport, ...], boots: Mapping[int, str]) -> bool:
    """Whether an answer comes from a worker that is not the one that was attached."""
    return any(boots.get(rank.rank) != rank.boot for rank in ranks)


def _shared_refusal(failed: list[RankReport]) -> Code | None:
    """The one client-side code that all failed ranks give."""
    codes = {rank.error.code if rank.error else Code.INTERNAL for rank in failed}
    if len(codes) != 1:
        return None
    (code,) = codes
    status = STATUS[code][0]
    return code if status < 500 or status == 507 else None


def _per_rank(ranks: tuple[RankReport, ...]) -> list[dict[str, object]]:
    return [
        {
            "rank": rank.rank,
            "boot": rank.boot,
            "ok": rank.ok,
            "error": rank.error.model_dump(mode="json") if rank.error else None,
        }
        for rank in ranks
    ]
