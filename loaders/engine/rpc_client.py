"""The bridge's side of the RPC discipline: every rank answers, with this call's nonce, or the call failed."""

import asyncio
import uuid
from typing import Any

from pydantic import ValidationError

from loaders.engine.rpc import Answer
from schemas.problems import Code, ProblemError

_FIRST_POLL_S = 0.002
_SLOWEST_POLL_S = 0.05


class Workers:
    """All workers of an engine, asked together. No time-out is ever passed to vLLM's RPC."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def ask(self, method: str, *arguments: str) -> list[Answer]:
        """Call one method on every rank, in the order of ranks.

        Raises ProblemError `state_unknown` if an answer is none, or belongs to another call.
        """
        nonce = uuid.uuid4().hex
        per_engine = await self._engine.engine_core.call_utility_all_async(
            "collective_rpc", method, None, (nonce, *arguments), None
        )
        try:
            answers = [Answer.model_validate_json(text) for ranks in per_engine for text in ranks]
        except ValidationError as error:
            raise ProblemError(Code.STATE_UNKNOWN, f"a rank did not answer {method}") from error
        if not answers or any(answer.nonce != nonce for answer in answers):
            raise ProblemError(
                Code.STATE_UNKNOWN, f"a rank answered {method} with the answer to another call"
            )
        return sorted(answers, key=lambda answer: answer.rank)

    async def run(self, method: str, request: str, timeout_s: float) -> list[Answer]:
        """Start a job on every rank and poll until all have ended.

        Raises ProblemError `prepare_failed` if they have not in time; the jobs are then
        given up. So are jobs that nobody polls, by themselves.
        """
        started = await self.ask(method, request)
        job = started[0].nonce
        if any(answer.error for answer in started):
            await self.ask("graft_give_up", job)
            return started
        done: dict[int, Answer] = {}
        pause = _FIRST_POLL_S
        deadline = asyncio.get_running_loop().time() + timeout_s
        while len(done) < len(started):
            if asyncio.get_running_loop().time() > deadline:
                await self.ask("graft_give_up", job)
                raise ProblemError(Code.PREPARE_FAILED, f"{method} took more than {timeout_s} s")
            await asyncio.sleep(pause)
            answers = await self.ask("graft_poll", job)
            served = any(answer.served for answer in answers)
            pause = _FIRST_POLL_S if served else min(pause * 1.5, _SLOWEST_POLL_S)
            for answer in answers:
                if not answer.pending:
                    done.setdefault(answer.rank, answer)
        return [done[rank] for rank in sorted(done)]
