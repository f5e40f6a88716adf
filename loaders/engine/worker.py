"""The worker extension: what vLLM's workers run for Graft, by RPC between two steps.

Every method takes and returns JSON text, never raises and never waits. Work that
takes long becomes a job under the caller's nonce, which later calls poll.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from loaders.engine.catalogued import catalogued
from loaders.engine.job import Job, MainThread
from loaders.engine.rpc import Answer, guarded
from loaders.engine.session import Session, StateUnknown
from schemas.bridge import (
    CommitRequest,
    DigestsRequest,
    ForgetRequest,
    PrepareRequest,
    ReadRequest,
)
from schemas.problems import Code, ProblemError


class GraftWorker:
    """Methods mixed into vLLM's worker class; names are prefixed, as vLLM refuses clashes."""

    graft_session: Session | None = None
    graft_failure: str = "graft_begin was not called"
    graft_jobs: dict[str, Job[Any]]
    graft_unknown: str | None = None

    def graft_begin(self, nonce: str) -> str:
        """Build the session: twin, trace, treatments. Once, before the engine serves."""
        worker: Any = self

        def build() -> None:
            self.graft_jobs = {}
            folder = Path(os.environ.get("GRAFT_SHARD_DIR") or tempfile.gettempdir())
            self.graft_session = Session(
                _rank_of(worker), worker.vllm_config, worker.model_runner.get_model(), folder
            )

        if self.graft_session is not None:
            return self.graft_answer(nonce, lambda: None)
        _, error = guarded(build)
        if error is not None:
            self.graft_failure = error.detail
        return Answer(nonce=nonce, rank=_rank_of(worker), boot="", error=error).model_dump_json()

    def graft_answer(self, nonce: str, function: Callable[[], BaseModel | None]) -> str:
        """Call `function` and put what it returns or raises into an answer."""
        session = self.graft_session
        worker: Any = self
        if session is None:
            refusal = ProblemError(Code.NOT_SUPPORTED, self.graft_failure)
            _, error = guarded(lambda: _raise(refusal))
            return Answer(nonce=nonce, rank=_rank_of(worker), boot="", error=error).model_dump_json()
        value, error = guarded(function)
        dumped = value.model_dump(mode="json") if isinstance(value, BaseModel) else None
        return Answer(
            nonce=nonce, rank=session.rank, boot=session.boot, value=dumped, error=error
        ).model_dump_json()

    def graft_need(self) -> Session:
        """The session, if this rank's weights are known."""
        if self.graft_session is None:
            raise ProblemError(Code.NOT_SUPPORTED, self.graft_failure)
        if self.graft_unknown is not None:
            raise ProblemError(Code.STATE_UNKNOWN, self.graft_unknown)
        return self.graft_session

    # -- at once ---------------------------------------------------------------------

    def graft_describe(self, nonce: str) -> str:
        """The catalogue of checkpoint tensors as this rank treats them."""
        worker: Any = self

        def describe() -> BaseModel:
            session = self.graft_need()
            return catalogued(worker.vllm_config, session.atlas.catalogue, str(session.checkpoint))

        return self.graft_answer(nonce, describe)

    def graft_state(self, nonce: str) -> str:
        """Version, prepared work and undo."""
        return self.graft_answer(nonce, lambda: self.graft_need().state())

    def graft_running(self, nonce: str) -> str:
        """Version, and the requests that hold KV on this rank or did before they were preempted."""
        worker: Any = self
        return self.graft_answer(
            nonce, lambda: Running(version=self.graft_need().version, requests=_requests(worker.model_runner))
        )

    def graft_apply(self, nonce: str, request: str) -> str:
        """Phase two on this rank."""

        def apply() -> BaseModel:
            try:
                return self.graft_need().apply(CommitRequest.model_validate_json(request))
            except StateUnknown as error:
                self.graft_unknown = str(error)
                raise ProblemError(Code.STATE_UNKNOWN, str(error)) from error

        return self.graft_answer(nonce, apply)

    def graft_undo(self, nonce: str, key: str) -> str:
        """Take back a commit that failed elsewhere."""

        def undo() -> None:
            try:
                self.graft_need().undo(key)
            except StateUnknown as error:
                self.graft_unknown = str(error)
                raise ProblemError(Code.STATE_UNKNOWN, str(error)) from error

        return self.graft_answer(nonce, undo)

    def graft_drop(self, nonce: str, key: str) -> str:
        """Drop prepared work."""
        return self.graft_answer(nonce, lambda: self.graft_need().drop(key))

    def graft_settle(self, nonce: str, key: str) -> str:
        """A commit has ended on all ranks."""
        return self.graft_answer(nonce, lambda: self.graft_need().settle(key))

    def graft_forget(self, nonce: str, request: str) -> str:
        """Drop undo."""
        return self.graft_answer(
            nonce, lambda: self.graft_need().forget(ForgetRequest.model_validate_json(request).versions)
        )

    # -- jobs ------------------------------------------------------------------------

    def graft_start_prepare(self, nonce: str, request: str) -> str:
        """Start phase one as a job."""
        return self.graft_start(
            nonce, lambda s, main: s.prepare(PrepareRequest.model_validate_json(request), main)
        )

    def graft_start_digests(self, nonce: str, request: str) -> str:
        """Start taking digests as a job."""

        def digests(session: Session, main: MainThread) -> BaseModel:
            version, found = session.digests(DigestsRequest.model_validate_json(request).prefix, main)
            return VersionedDigests(version=version, digests=found)

        return self.graft_start(nonce, digests)

    def graft_start_read(self, nonce: str, request: str) -> str:
        """Start reading tensors back as a job."""
        return self.graft_start(nonce, lambda s, main: s.read(ReadRequest.model_validate_json(request), main))

    def graft_start(self, nonce: str, work: Callable[[Session, MainThread], BaseModel]) -> str:
        """Start a job under the nonce."""

        def start() -> None:
            session = self.graft_need()
            self.graft_jobs[nonce] = Job(lambda main: work(session, main))

        return self.graft_answer(nonce, start)

    def graft_poll(self, nonce: str, job: str) -> str:
        """Serve a job for a while; its result once it has ended, after which it is gone."""
        session = self.graft_session
        if session is None or job not in self.graft_jobs:
            return self.graft_answer(nonce, lambda: _raise(ProblemError(Code.INTERNAL, f"no job {job}")))
        running = self.graft_jobs[job]
        if not running.poll():
            return Answer(
                nonce=nonce, rank=session.rank, boot=session.boot, pending=True, served=running.served
            ).model_dump_json()
        return self.graft_answer(nonce, self.graft_jobs.pop(job).result)

    def graft_give_up(self, nonce: str, job: str) -> str:
        """Drop a job that took too long; it ends at its next step and leaves nothing."""

        def give_up() -> None:
            if job in self.graft_jobs:
                self.graft_jobs.pop(job).give_up()

        return self.graft_answer(nonce, give_up)


class VersionedDigests(BaseModel):
    """Digests of one rank and the version that they are of."""

    version: int
    digests: Any


class Running(BaseModel):
    """Requests of one rank, by vLLM's own ids."""

    version: int
    requests: tuple[str, ...]


def _rank_of(worker: Any) -> int:
    """Number of the worker among those of all data-parallel engines, each of which counts from 0."""
    parallel = worker.vllm_config.parallel_config
    rank: int = parallel.data_parallel_index * parallel.world_size + worker.rank
    return rank


def _requests(runner: Any) -> tuple[str, ...]:
    """What the model runner holds; vLLM's second runner keeps it elsewhere than its first."""
    if hasattr(runner, "requests"):
        return tuple(runner.requests)
    return tuple(runner.req_states.req_id_to_index)


def _raise(error: Exception) -> None:
    raise error
