"""What a commit does with requests that run: refused before, waited for, ended, or left with old KV."""

import asyncio
import logging
from typing import Any

from loaders.engine.rpc_client import Workers
from schemas.bridge import CommitRequest
from schemas.problems import Code, ProblemError
from schemas.transactions import InFlight

_log = logging.getLogger(__name__)

_WEIGHTLESS = ("ngram", "ngram_gpu", "suffix")
"""Speculation without a model of its own."""
_LONGEST_S = 3600.0
_POLL_S = 0.25


class NotBegun(ProblemError):
    """A commit that ends before any weight is written."""


async def check(engine: Any, request: CommitRequest) -> None:
    """Raises NotBegun if the engine must not be changed now, or not in this way."""
    config = engine.vllm_config
    speculative = config.speculative_config
    if speculative is not None and speculative.method not in _WEIGHTLESS:
        detail = f"The engine runs a draft model ({speculative.method}), whose weights would stay old."
        raise NotBegun(Code.DRAFT_MODEL, detail)
    if request.in_flight is InFlight.KEEP and config.model_config.is_multimodal_model:
        # Its encoder cache can't be reset beside requests that run.
        raise NotBegun(Code.NOT_SUPPORTED, "in_flight=keep is not supported for multimodal models.")
    if await engine.is_sleeping():  # vLLM says so of an engine that somebody paused, too
        raise NotBegun(Code.ENGINE_ASLEEP, "Wake the engine, or resume its generation, first.")


async def pause(core: Any, request: CommitRequest) -> None:
    """Pause generation in the way that `request` asks for; caches are left alone.

    Raises NotBegun if requests run on for longer than `wait` may take; the caller
    resumes in any case.
    """
    if request.in_flight is not InFlight.WAIT:
        mode = "abort" if request.in_flight is InFlight.ABORT else "keep"
        await core.pause_scheduler_async(mode=mode, clear_cache=False)
        return
    draining = asyncio.ensure_future(core.pause_scheduler_async(mode="wait", clear_cache=False))
    done, _ = await asyncio.wait({draining}, timeout=request.drain_timeout_s)
    if done:
        await draining
        return
    # vLLM may refuse to resume while a pause is in flight; one that waits for nobody ends both.
    draining.add_done_callback(_seen)
    await core.pause_scheduler_async(mode="keep", clear_cache=False)
    detail = f"Running requests did not end within drain_timeout_s = {request.drain_timeout_s:g}."
    raise NotBegun(Code.DRAIN_TIMEOUT, detail)


def _seen(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()


async def running(workers: Workers) -> tuple[int, frozenset[str]]:
    """The version of the first rank, and the ids of all requests that some rank holds.

    Raises ProblemError if a rank does not say.
    """
    answers = await workers.ask("graft_running")
    for answer in answers:
        if answer.error is not None:
            raise ProblemError(answer.error.code, f"rank {answer.rank}: {answer.error.detail}")
    values: list[Any] = [answer.value for answer in answers]
    return int(values[0]["version"]), frozenset(name for value in values for name in value["requests"])


class MixedCache:
    """A prefix cache with blocks of old weights, while `old` requests that go on with theirs still run."""

    def __init__(self, engine: Any, workers: Workers, version: int, old: frozenset[str]) -> None:
        self._engine = engine
        self._workers = workers
        self._version = version
        self._old = old

    async def clear(self, poll_s: float = _POLL_S, longest_s: float = _LONGEST_S) -> None:
        """Reset it once the last old request has ended, or after `longest_s` seconds in any case.

        Younger requests that run may have hit old blocks, so they are computed again. A
        later commit has seen to the cache itself, so this then ends without a reset.
        """
        deadline = asyncio.get_running_loop().time() + longest_s
        while asyncio.get_running_loop().time() < deadline:
            version, now = await running(self._workers)
            if version != self._version:
                if await self._superseded():
                    return
            elif not self._old & now:
                break
            await asyncio.sleep(poll_s)
        while not await self._reset():
            await asyncio.sleep(poll_s)
            if await self._superseded():
                return

    async def _superseded(self) -> bool:
        """Whether a later commit is done; one that is being undone only looks like it, and is paused."""
        for _ in range(2):
            version, _ = await running(self._workers)
            if version == self._version or await self._engine.is_paused():
                return False
        return True

    async def _reset(self) -> bool:
        try:
            done: bool = await self._engine.reset_prefix_cache(
                reset_running_requests=True, reset_connector=True
            )
        except Exception as error:  # noqa: BLE001 - vLLM's own kinds; while blocks are being freed it may fail
            _log.warning("the prefix cache was not reset: %s", error)
            return False
        if done:
            _log.info("version %d: the last request with old KV has ended; prefix cache reset", self._version)
        return done
