"""The bridge: Graft's routes on vLLM's API server, an endpoint plugin.

It keeps no state in its process, of which there may be several; what a route needs
it asks of the workers. Only whoever holds the secret in `GRAFT_ENGINE_SECRET_FILE`
may call it: vLLM's own `--api-key` does not guard plugin routes.
"""

import asyncio
import hmac
import logging
import os
import time
from argparse import Namespace
from collections.abc import Awaitable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import State

from loaders.engine.catalogued import Catalogued, described
from loaders.engine.commit import Commit, first_problem, report_of
from loaders.engine.in_flight import MixedCache
from loaders.engine.readback import ReadPart, whole
from loaders.engine.rpc import Answer
from loaders.engine.rpc_client import Workers
from schemas.bridge import (
    PREFIX,
    CommitRequest,
    CommitResult,
    DigestsRequest,
    DigestsResult,
    EngineDescription,
    EngineState,
    ForgetRequest,
    KeyRequest,
    Outcome,
    PrepareRequest,
    PrepareResult,
    RankDigests,
    RankState,
    ReadRequest,
    ReadResult,
)
from schemas.problems import Code, ProblemError

_log = logging.getLogger(__name__)
_READ_TIMEOUT_S = 600.0
BASE_VERSION = "0"
"""What completions carry until the first commit."""


class GraftBridge:
    """vLLM's `EndpointPlugin` protocol."""

    name = "graft"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, all behind the secret."""
        app.include_router(_router)
        app.add_exception_handler(ProblemError, _refuse)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Build every worker's session before the server answers its first request."""
        state.graft_engine = engine_client
        state.graft_secret = _read_secret()
        state.graft_background = set()
        if engine_client is None:
            return
        answers = await Workers(engine_client).ask("graft_begin")
        for answer in answers:
            if answer.error is not None:
                _log.error("rank %d: %s", answer.rank, answer.error.detail)
        await engine_client.update_weight_version(BASE_VERSION)


def _read_secret() -> bytes:
    """Raises RuntimeError if there is none: an open bridge would let anybody change weights."""
    path = os.environ.get("GRAFT_ENGINE_SECRET_FILE")
    if not path:
        raise RuntimeError("GRAFT_ENGINE_SECRET_FILE is not set")
    secret = Path(path).read_bytes().strip()
    if not secret:
        raise RuntimeError(f"{path} is empty")
    return secret


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ProblemError)
    problem = error.problem()
    return JSONResponse(
        problem.model_dump(mode="json"), status_code=problem.status, media_type="application/problem+json"
    )


def _authorised(request: Request) -> None:
    given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
    if not hmac.compare_digest(given, request.app.state.graft_secret):
        raise ProblemError(Code.UNAUTHORIZED, "the engine's secret is needed")


def _engine(request: Request) -> Any:
    return request.app.state.graft_engine


Engine = Annotated[Any, Depends(_engine)]
_router = APIRouter(prefix=PREFIX, dependencies=[Depends(_authorised)])


def _values(answers: list[Answer]) -> list[Any]:
    problem = first_problem(answers)
    if problem is not None:
        raise problem
    return [answer.value for answer in answers]


async def _to_the_end(work: Awaitable[Any]) -> Any:
    """A client that goes away must not cancel what has begun."""
    return await asyncio.shield(asyncio.ensure_future(work))


@_router.get("/describe")
async def describe(engine: Engine) -> EngineDescription:
    """The model and what can be done with each of its tensors."""
    values = _values(await Workers(engine).ask("graft_describe"))
    ranks = [Catalogued.model_validate(value) for value in values]
    return described(ranks)


@_router.get("/state")
async def state(engine: Engine) -> EngineState:
    """Where every rank is."""
    ranks = _values(await Workers(engine).ask("graft_state"))
    return EngineState(
        ranks=tuple(RankState.model_validate(rank) for rank in ranks),
        paused=await engine.is_paused(),
        weight_version=await engine.get_weight_version(),
    )


@_router.post("/prepare")
async def prepare(engine: Engine, request: PrepareRequest) -> PrepareResult:
    """Phase one on all ranks; a failure on one drops the work of all."""
    return PrepareResult.model_validate(await _to_the_end(_prepare(Workers(engine), request)))


async def _prepare(workers: Workers, request: PrepareRequest) -> PrepareResult:
    started = time.perf_counter()
    try:
        answers = await workers.run("graft_start_prepare", request.model_dump_json(), request.timeout_s)
    except ProblemError:
        await workers.ask("graft_drop", request.key)
        raise
    reports = tuple(report_of(answer, request.nonce) for answer in answers)
    ok = all(report.ok for report in reports)
    if not ok:
        await workers.ask("graft_drop", request.key)
    return PrepareResult(
        outcome=Outcome.DONE if ok else Outcome.FAILED,
        ranks=reports,
        prepare_ms=1e3 * (time.perf_counter() - started),
    )


@_router.post("/commit")
async def commit(engine: Engine, request: CommitRequest, http: Request) -> CommitResult:
    """Phase two on all ranks or none."""
    commit = Commit(engine, Workers(engine), request)
    result: CommitResult = await _to_the_end(_commit(commit, http.app.state.graft_background))
    return result


async def _commit(commit: Commit, background: set[asyncio.Task[None]]) -> CommitResult:
    result = await commit.run()
    if commit.mixed is not None and result.outcome is Outcome.DONE:
        clearing = asyncio.create_task(_cleared(commit.mixed))
        background.add(clearing)
        clearing.add_done_callback(background.discard)
    return result


async def _cleared(mixed: MixedCache) -> None:
    try:
        await mixed.clear()
    except Exception:  # noqa: BLE001 - vLLM raises what it likes when its engine is gone, and the cache with it
        _log.exception("the prefix cache stays mixed until the next commit")


@_router.post("/drop")
async def drop(engine: Engine, request: KeyRequest) -> None:
    """Drop prepared work."""
    _values(await Workers(engine).ask("graft_drop", request.key))


@_router.post("/forget")
async def forget(engine: Engine, request: ForgetRequest) -> None:
    """Drop undo."""
    _values(await Workers(engine).ask("graft_forget", request.model_dump_json()))


@_router.post("/digests")
async def digests(engine: Engine, request: DigestsRequest) -> DigestsResult:
    """Digests of all ranks, all of one version."""
    answers = await Workers(engine).run("graft_start_digests", request.model_dump_json(), _READ_TIMEOUT_S)
    values = _values(answers)
    versions = {value["version"] for value in values}
    if len(versions) != 1:
        raise ProblemError(Code.BUSY, "a commit came in between")
    ranks = tuple(RankDigests.model_validate(value["digests"]) for value in values)
    return DigestsResult(version=versions.pop(), ranks=ranks)


@_router.post("/read")
async def read(engine: Engine, request: ReadRequest) -> ReadResult:
    """Weights read back into a file, all of one version."""
    answers = await Workers(engine).run("graft_start_read", request.model_dump_json(), _READ_TIMEOUT_S)
    return whole([ReadPart.model_validate(value) for value in _values(answers)])
