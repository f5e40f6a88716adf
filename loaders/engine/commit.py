"""Phase two over all ranks: one pause in which all of them change or none does."""

import logging
import time
from typing import Any

from loaders.engine import in_flight
from loaders.engine.in_flight import MixedCache, NotBegun
from loaders.engine.rpc import Answer
from loaders.engine.rpc_client import Workers
from schemas.bridge import CommitRequest, CommitResult, Outcome, RankReport
from schemas.problems import Code, ProblemError
from schemas.transactions import InFlight

_log = logging.getLogger(__name__)

_IN_FLIGHT = {InFlight.WAIT: "finished", InFlight.ABORT: "aborted", InFlight.KEEP: "kept"}
"""What happened to running requests, by the mode that was carried out."""


class Commit:
    """One commit: pause, apply, check, reset caches, stamp the version, resume."""

    def __init__(self, engine: Any, workers: Workers, request: CommitRequest) -> None:
        self._engine = engine
        self._core = engine.engine_core
        self._workers = workers
        self._request = request
        self._reports: tuple[RankReport, ...] = ()
        self._caches: dict[str, str] = {}
        self._detail: str | None = None
        self._code: Code | None = None
        self.mixed: MixedCache | None = None
        """What is left to be done after a commit that kept requests; whoever ran it sees to that."""
        self._times = {"pause": 0.0, "apply": 0.0, "resume": 0.0}

    async def run(self) -> CommitResult:
        """Carry it out. Generation resumes on every way out but one: outcome `unknown`."""
        try:
            await in_flight.check(self._engine, self._request)
        except Exception as error:  # noqa: BLE001 - as below; nothing was touched, so nothing is resumed
            self._note(error)
            return self._result(Outcome.FAILED)
        outcome = Outcome.FAILED
        try:
            await self._timed("pause", in_flight.pause(self._core, self._request))
            outcome = Outcome.UNKNOWN
            outcome = await self._timed("apply", self._apply_or_undo())
        except Exception as error:  # noqa: BLE001 - whatever it is, the outcome says what is known
            self._note(error)
        if outcome is not Outcome.UNKNOWN:
            outcome = await self._resume(outcome)
        return self._result(outcome)

    def _result(self, outcome: Outcome) -> CommitResult:
        recomputed = "recomputed" if self._caches.get("prefix") == "reset" else "kept"
        return CommitResult(
            outcome=outcome,
            ranks=self._reports,
            pause_ms=self._times["pause"],
            apply_ms=self._times["apply"],
            resume_ms=self._times["resume"],
            caches=self._caches,
            in_flight=_IN_FLIGHT.get(self._request.in_flight, recomputed),
            detail=self._detail,
            code=self._code,
        )

    async def _resume(self, outcome: Outcome) -> Outcome:
        """Serve again. An engine that cannot is as good as one whose weights are unknown."""
        try:
            await self._timed("resume", self._core.resume_scheduler_async())
        except Exception as error:  # noqa: BLE001 - vLLM raises what it likes when its engine is gone
            self._note(error)
            return Outcome.UNKNOWN
        try:
            await self._workers.ask("graft_settle", self._request.key)
        except Exception as error:  # noqa: BLE001 - leftovers do not change how the commit ended
            self._note(error)
        return outcome

    def _note(self, error: Exception) -> None:
        if isinstance(error, NotBegun):
            self._code, self._detail = error.code, error.detail
            return
        _log.error("commit %s", self._request.key, exc_info=error)
        self._detail = f"{type(error).__name__}: {error}"

    async def _timed(self, step: str, awaitable: Any) -> Any:
        started = time.perf_counter()
        try:
            return await awaitable
        finally:
            self._times[step] = 1e3 * (time.perf_counter() - started)

    async def _apply_or_undo(self) -> Outcome:
        answers = await self._workers.ask("graft_apply", self._request.model_dump_json())
        self._reports = tuple(report_of(answer, self._request.nonce) for answer in answers)
        if any(a.error and a.error.code is Code.STATE_UNKNOWN for a in answers):
            self._detail = "a rank could not put back what it had overwritten"
            return Outcome.UNKNOWN
        if all(report.ok for report in self._reports) and await self._finish():
            return Outcome.DONE
        undone = await self._workers.ask("graft_undo", self._request.key)
        if any(answer.error for answer in undone):
            self._reports = tuple(report_of(answer, self._request.nonce) for answer in undone)
            self._detail = "a rank could not undo the commit"
            return Outcome.UNKNOWN
        return Outcome.FAILED

    async def _finish(self) -> bool:
        """Caches and version, still in the pause; a failure means that the commit is undone."""
        try:
            if not await self._keep_caches():
                await self._reset_caches()
            if "failed" in self._caches.values():
                return False
            await self._engine.update_weight_version(str(self._request.version))
        except Exception as error:  # noqa: BLE001 - vLLM raises RuntimeError and its own kinds alike
            self._note(error)
            return False
        return True

    async def _keep_caches(self) -> bool:
        """Leave the caches to requests that go on with KV of the old weights, if there are any."""
        if self._request.in_flight is not InFlight.KEEP:
            return False
        _, old = await in_flight.running(self._workers)
        if not old:
            return False
        connector = "none" if self._engine.vllm_config.kv_transfer_config is None else "mixed"
        self._caches = {"prefix": "mixed", "connector": connector, "encoder": "none"}
        self.mixed = MixedCache(self._engine, self._workers, self._request.version, old)
        return True

    async def _reset_caches(self) -> None:
        """Running requests are preempted, so that their KV is computed again with the new weights."""
        self._caches = {"prefix": "failed", "connector": "none", "encoder": "failed"}
        if self._engine.vllm_config.kv_transfer_config is not None:
            self._caches["connector"] = "failed"
        done = await self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if done:
            self._caches["prefix"] = "reset"
            if self._caches["connector"] == "failed":
                self._caches["connector"] = "reset"
        else:
            self._detail = "the prefix cache was not reset"
        await self._engine.reset_mm_cache()
        await self._engine.reset_encoder_cache()
        self._caches["encoder"] = "reset"


def report_of(answer: Answer, nonce: str) -> RankReport:
    """A rank's report, made from its error if it has none; `nonce` is of the admin's request."""
    if answer.error is None and answer.value is not None:
        return RankReport.model_validate(answer.value)
    ok = answer.error is None
    return RankReport(nonce=nonce, rank=answer.rank, boot=answer.boot, ok=ok, error=answer.error)


def first_problem(answers: list[Answer]) -> ProblemError | None:
    """The first rank's error as a refusal, if any rank has one."""
    for answer in answers:
        if answer.error is not None:
            return ProblemError(answer.error.code, f"rank {answer.rank}: {answer.error.detail}")
    return None
