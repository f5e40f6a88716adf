"""Calls to the engine's bridge, each bounded in time."""

import asyncio
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from app.failpoints import Failpoints
from app.settings import Settings
from schemas import bridge
from schemas.problems import Code, ProblemError
from schemas.transactions import RECOMPUTE, FlightOptions, InFlight

Answer = TypeVar("Answer", bound=BaseModel)


class EngineUnreachable(ProblemError):
    """No connection came about: the engine was not asked."""

    def __init__(self) -> None:
        super().__init__(Code.ENGINE_UNAVAILABLE, "The engine does not accept connections.")


class EngineLost(ProblemError):
    """The question was sent, but no valid answer came: the engine may have acted on it."""

    def __init__(self, detail: str) -> None:
        super().__init__(Code.ENGINE_UNAVAILABLE, detail)


@dataclass(frozen=True)
class Work:
    """What to prepare: staged uploads, or the way back to the version `restore`."""

    uploads: tuple[bridge.StagedUpload, ...] = ()
    restore: int | None = None
    undo_most: int | None = None
    """Bytes of undo per rank for which there is room."""
    replay: bool = False


class EngineClient:
    """The bridge's routes as methods.

    All of them raise EngineUnreachable, EngineLost, or the ProblemError that the
    bridge answered with.
    """

    def __init__(
        self,
        settings: Settings,
        failpoints: Failpoints,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._settings = settings
        self._failpoints = failpoints
        self._secret: str | None = None
        self._silent_since: float | None = None
        self._http = httpx.AsyncClient(
            base_url=settings.engine_url.rstrip("/") + bridge.PREFIX,
            transport=transport,
            # A kept connection may be closed by the engine just when a commit is sent over it.
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,  # a proxy has no business between the two
        )

    @property
    def url(self) -> str:
        """Where the engine is looked for."""
        return self._settings.engine_url

    @property
    def silent_s(self) -> float:
        """For how long the engine has answered nothing that it was asked; 0 if it answered last."""
        return 0.0 if self._silent_since is None else time.monotonic() - self._silent_since

    def heard(self) -> None:
        """The engine answered, or is not there to do so: its silence ends."""
        self._silent_since = None

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def load_secret(self) -> None:
        """Read the secret again, which may be another after a restart. Raises engine_unavailable."""
        path = self._settings.engine_secret_file
        if path is None:
            return
        try:
            self._secret = (await asyncio.to_thread(Path.read_text, path, "utf-8")).strip()
        except FileNotFoundError:
            self._secret = None  # the engine has not got as far yet; it will say that it wants one
        except (OSError, UnicodeDecodeError) as error:
            detail = "The engine's secret file can't be read."
            raise ProblemError(Code.ENGINE_UNAVAILABLE, detail) from error

    async def describe(self) -> bridge.EngineDescription:
        """What the engine is; the answer can be megabytes, so it is parsed in a thread."""
        content = await self._ask("GET", "describe", None, self._settings.engine_read_s)
        return await asyncio.to_thread(_parse, bridge.EngineDescription, content)

    async def state(self, within_s: float | None = None) -> bridge.EngineState:
        """Where every rank stands, asked for `within_s` seconds if that is given."""
        content = await self._ask("GET", "state", None, within_s or self._settings.engine_answer_s)
        return _parse(bridge.EngineState, content)

    async def prepare(self, key: str, base_version: int, work: Work) -> bridge.PrepareResult:
        """Phase one on every rank."""
        bound = self._settings.engine_prepare_s
        request = bridge.PrepareRequest(
            nonce=_nonce(),
            key=key,
            base_version=base_version,
            uploads=work.uploads,
            restore=work.restore,
            undo_most=work.undo_most,
            replay=work.replay,
            timeout_s=0.9 * bound,  # so that its own answer comes before ours
        )
        result = await self._post("prepare", request, bridge.PrepareResult, bound)
        _check_nonce(result.ranks, request.nonce)
        return result

    async def commit(self, key: str, version: int, flight: FlightOptions = RECOMPUTE) -> bridge.CommitResult:
        """Phase two on every rank."""
        request = bridge.CommitRequest(
            nonce=_nonce(),
            key=key,
            version=version,
            in_flight=flight.in_flight,
            drain_timeout_s=flight.drain_timeout_s or self._settings.drain_s,
        )
        bound = self._settings.engine_commit_s + self.drain_s(flight)
        result = await self._post("commit", request, bridge.CommitResult, bound)
        _check_nonce(result.ranks, request.nonce)
        return result

    def drain_s(self, flight: FlightOptions) -> float:
        """How long running requests may hold up a commit, in seconds."""
        if flight.in_flight is not InFlight.WAIT:
            return 0.0
        return flight.drain_timeout_s or self._settings.drain_s

    async def drop(self, key: str) -> None:
        """Let go of prepared work; unknown keys are fine."""
        request = bridge.KeyRequest(nonce=_nonce(), key=key)
        await self._ask("POST", "drop", request, self._settings.engine_answer_s)

    async def forget(self, versions: Sequence[int]) -> None:
        """Let go of the undo of `versions`."""
        request = bridge.ForgetRequest(nonce=_nonce(), versions=tuple(versions))
        await self._ask("POST", "forget", request, self._settings.engine_answer_s)

    async def digests(self, prefix: str) -> bridge.DigestsResult:
        """Digests of runtime tensors per rank."""
        request = bridge.DigestsRequest(nonce=_nonce(), prefix=prefix)
        return await self._post("digests", request, bridge.DigestsResult, self._settings.engine_read_s)

    async def read(
        self, path: Path, tensors: Sequence[bridge.ReadTensor], metadata: Mapping[str, str] | None = None
    ) -> bridge.ReadResult:
        """Have the engine write `tensors` to the file at `path`."""
        request = bridge.ReadRequest(
            nonce=_nonce(), path=str(path), tensors=tuple(tensors), metadata=dict(metadata or {})
        )
        return await self._post("read", request, bridge.ReadResult, self._settings.engine_read_s)

    async def _post(self, name: str, request: BaseModel, kind: type[Answer], bound_s: float) -> Answer:
        return _parse(kind, await self._ask("POST", name, request, bound_s))

    async def _ask(self, method: str, name: str, request: BaseModel | None, bound_s: float) -> bytes:
        headers = {"authorization": f"Bearer {self._secret}"} if self._secret else {}
        if request is not None:
            headers["content-type"] = "application/json"
        self._failpoints.reach(f"bridge.{name}.before")
        try:
            async with asyncio.timeout(bound_s):
                response = await self._http.request(
                    method,
                    f"/{name}",
                    content=request.model_dump_json() if request is not None else None,
                    headers=headers,
                    timeout=httpx.Timeout(None, connect=self._settings.engine_connect_s),
                )
        except httpx.ConnectError as error:
            self.heard()
            raise EngineUnreachable from error
        except httpx.ConnectTimeout as error:
            self._not_heard()
            raise EngineUnreachable from error
        except TimeoutError as error:
            self._not_heard()
            raise EngineLost("The engine did not answer in time.") from error
        except httpx.HTTPError as error:
            raise EngineLost("The connection to the engine broke.") from error
        self.heard()
        self._failpoints.reach(f"bridge.{name}.after")
        if response.is_success:
            return response.content
        raise _refusal(response)

    def _not_heard(self) -> None:
        if self._silent_since is None:
            self._silent_since = time.monotonic()


def _nonce() -> str:
    return secrets.token_hex(16)


def _parse(kind: type[Answer], content: bytes) -> Answer:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise EngineLost("The engine's answer is not understood.") from error


def _check_nonce(reports: Iterable[bridge.RankReport], nonce: str) -> None:
    """Refuse an answer in which a rank worked on another request than this one."""
    if any(report.nonce != nonce for report in reports):
        raise EngineLost("The engine answered another question than the one asked.")


def _refusal(response: httpx.Response) -> ProblemError:
    """The bridge's own problem, if its answer is one."""
    try:
        document = response.json()
        members = {
            k: v for k, v in document.items() if k not in ("type", "title", "status", "detail", "code")
        }
        return ProblemError(Code(document["code"]), str(document["detail"]), **members)
    except (ValueError, KeyError, AttributeError, TypeError):
        return EngineLost(f"The engine answered with HTTP status {response.status_code}.")
