"""The client for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx
from httpx_sse import aconnect_sse

from app.remote import calls, events
from app.remote.attempts import Attempts, Retry
from app.remote.bodies import Watch, threaded
from app.remote.call import Call, ReadBack, length_of, version_of
from app.remote.calls import Choices
from app.remote.connection import CONNECT_S, HURRIED, SILENCE_S, STUBBORN, URL, options
from app.remote.errors import BadAnswer, GraftError, Unreachable
from app.remote.files import appearing
from app.remote.followed import POLL_S, ended, running, unfollowed
from app.remote.methods import async_method, async_method_of_id
from app.remote.opened import Opened
from schemas import transactions as wire
from schemas.operations import Operation
from schemas.transactions import Receipt

T = TypeVar("T")


class AsyncClient:
    """The same for asyncio."""

    def __init__(
        self,
        url: str = URL,
        token: str | None = None,
        *,
        retry: Retry = STUBBORN,
        silence_s: float = SILENCE_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._retry = retry
        self._http = httpx.AsyncClient(transport=transport, **options(url, token, silence_s))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *why: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    def transaction(self, **choices: Unpack[Choices]) -> "AsyncTransaction":
        """For `async with`: commits at the end, aborts on an exception."""
        return AsyncTransaction(self, calls.open_transaction(**choices))

    async def send(self, call: Call[T], retry: Retry | None = None) -> T:
        """Send a call of `app.remote.calls`. Raises GraftError."""

        async def take(response: httpx.Response) -> T:
            await response.aread()
            return call.read(response)

        return await self._tried(call, take, retry)

    async def download(
        self, call: Call[ReadBack], path: Path, watch: Watch = lambda done, total: None
    ) -> int:
        """As `Client.download`."""

        async def save(response: httpx.Response) -> int:
            version, total = version_of(response), length_of(response)
            with appearing(path) as file:
                async for chunk in response.aiter_bytes():
                    await asyncio.to_thread(file.write, chunk)
                    watch(file.tell(), total)
            return version

        return await self._tried(call, save)

    async def wait(
        self, operation: Operation, seen: Callable[[Operation], None] = lambda operation: None
    ) -> Operation:
        """As `Client.wait`."""
        while running(operation):
            await asyncio.sleep(POLL_S)
            try:
                operation = await self.send(calls.operation(operation.id))
            except (BadAnswer, Unreachable) as error:
                raise unfollowed(operation, error) from error
            seen(operation)
        return ended(operation)

    async def events(
        self,
        last_event_id: str | None = None,
        *,
        connection: events.Connection = lambda trouble: None,
        silence_s: float = events.SILENCE_S,
    ) -> AsyncGenerator[events.Told, None]:
        """As `Client.events`; `contextlib.aclosing` ends the stream where the loop over it is left."""
        course = events.Course(last_event_id, self._retry, connection)
        timeout = httpx.Timeout(silence_s, connect=CONNECT_S)
        while True:
            try:
                async with aconnect_sse(
                    self._http, "GET", events.PATH, headers=course.headers(), timeout=timeout
                ) as source:
                    if source.response.is_success:
                        course.begun()
                        async with aclosing(source.aiter_sse()) as frames:
                            async for frame in frames:
                                if told := course.told(frame):
                                    yield told
                        pause = course.ended()
                    else:
                        await source.response.aread()
                        pause = course.refused(source.response)
            except httpx.HTTPError as error:
                pause = course.failed(error)
            await asyncio.sleep(pause)

    async def _tried(
        self, call: Call[Any], take: Callable[[httpx.Response], Awaitable[T]], retry: Retry | None = None
    ) -> T:
        attempts = Attempts(call, retry or self._retry)
        while True:
            try:
                async with self._http.stream(
                    call.method,
                    call.path,
                    params=call.query,
                    headers=call.head(),
                    content=threaded(attempts.chunks()),
                ) as response:
                    if response.is_success:
                        with attempts.reading():
                            return await take(response)
                    await response.aread()
                pause = attempts.refused(response)
            except httpx.HTTPError as error:
                pause = attempts.failed(error)
            await asyncio.sleep(pause)

    async def _call(self, describe: Callable[..., Call[Any]], *args: Any, **options: Any) -> Any:
        return await self.send(describe(*args, **options))

    status = async_method(calls.status)
    model = async_method(calls.model)
    tensors = async_method(calls.tensors)
    digests = async_method(calls.digests)
    versions = async_method(calls.versions)
    version = async_method(calls.version)
    current = async_method(calls.current)
    transactions = async_method(calls.transactions)
    baselines = async_method(calls.baselines)
    put_baseline = async_method(calls.put_baseline)
    delete_baseline = async_method(calls.delete_baseline)
    read_expert = async_method(calls.read_expert)
    read_tensor = async_method(calls.read_tensor)
    put_expert = async_method(calls.put_expert)
    patch = async_method(calls.patch)
    rollback = async_method(calls.rollback)
    reload = async_method(calls.reload)
    export = async_method(calls.export)
    operation = async_method(calls.operation)
    cancel = async_method(calls.cancel)


class AsyncTransaction(Opened):
    """As `Transaction`; made by `AsyncClient.transaction`."""

    def __init__(self, client: AsyncClient, opening: Call[wire.Transaction]) -> None:
        super().__init__(opening)
        self._client = client

    async def __aenter__(self) -> Self:
        self._id = (await self._client.send(self._opening)).id
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.ended:
            return
        if error is not None:
            await self._abandon(error)
            return
        try:
            await self.commit()
        except BaseException as refused:
            await self._abandon(refused)
            raise

    async def commit(self, if_match: int | str | None = None) -> Receipt:
        """Apply all of it now; `with` does so at its end. If this fails one can go on and try again."""
        self._receipt = await self._client.send(calls.commit(self.id, if_match=if_match))
        return self._receipt

    async def abort(self) -> None:
        """Drop what was uploaded."""
        await self._client.send(calls.abort(self.id))
        self._aborted = True

    async def _abandon(self, error: BaseException) -> None:
        try:
            await self._client.send(calls.abort(self.id), HURRIED)
        except GraftError as why:
            self._left_open(error, why)

    async def _call(self, describe: Callable[..., Call[Any]], *args: Any, **options: Any) -> Any:
        return await self._client.send(describe(self.id, *args, **options))

    put_expert = async_method_of_id(calls.stage_expert)
    patch = async_method_of_id(calls.stage_patches)
    prepare = async_method_of_id(calls.prepare)
    state = async_method_of_id(calls.transaction_state)
