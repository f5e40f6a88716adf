"""The client that waits for each answer."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx
from httpx_sse import connect_sse

from app.remote import calls, events
from app.remote.attempts import Attempts, Retry
from app.remote.bodies import Watch
from app.remote.call import Call, ReadBack, length_of, version_of
from app.remote.calls import Choices
from app.remote.connection import CONNECT_S, HURRIED, SILENCE_S, STUBBORN, URL, options
from app.remote.errors import BadAnswer, GraftError, Unreachable
from app.remote.files import appearing
from app.remote.followed import POLL_S, ended, running, unfollowed
from app.remote.methods import method, method_of_id
from app.remote.opened import Opened
from schemas import transactions as wire
from schemas.operations import Operation
from schemas.transactions import Receipt

T = TypeVar("T")


class Client:
    """A client that waits for each answer. Threads may share one."""

    def __init__(
        self,
        url: str = URL,
        token: str | None = None,
        *,
        retry: Retry = STUBBORN,
        silence_s: float = SILENCE_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._retry = retry
        self._http = httpx.Client(transport=transport, **options(url, token, silence_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def transaction(self, **choices: Unpack[Choices]) -> "Transaction":
        """For `with`: commits at the end, aborts on an exception."""
        return Transaction(self, calls.open_transaction(**choices))

    def send(self, call: Call[T], retry: Retry | None = None) -> T:
        """Send a call of `app.remote.calls`. Raises GraftError."""

        def take(response: httpx.Response) -> T:
            response.read()
            return call.read(response)

        return self._tried(call, take, retry)

    def download(self, call: Call[ReadBack], path: Path, watch: Watch = lambda done, total: None) -> int:
        """Stream weights into a file, which is there when it is complete; their version.

        Raises GraftError, OSError.
        """

        def save(response: httpx.Response) -> int:
            version, total = version_of(response), length_of(response)
            with appearing(path) as file:
                for chunk in response.iter_bytes():
                    file.write(chunk)
                    watch(file.tell(), total)
            return version

        return self._tried(call, save)

    def wait(
        self, operation: Operation, seen: Callable[[Operation], None] = lambda operation: None
    ) -> Operation:
        """Follow an operation until it is done or cancelled. Raises the GraftError with which it failed."""
        while running(operation):
            time.sleep(POLL_S)
            try:
                operation = self.send(calls.operation(operation.id))
            except (BadAnswer, Unreachable) as error:
                raise unfollowed(operation, error) from error
            seen(operation)
        return ended(operation)

    def events(
        self,
        last_event_id: str | None = None,
        *,
        connection: events.Connection = lambda trouble: None,
        silence_s: float = events.SILENCE_S,
    ) -> Iterator[events.Told]:
        """What happens, as it happens, without end; of each lost connection `connection` is told.

        Begins after the event of that id, or with `reset`, and goes on where it was when a connection is lost
        or says nothing for `silence_s` seconds. Raises Refused, BadAnswer if somebody else answers, and
        Unreachable where another connection would not help either, as with an address of another scheme.
        """
        course = events.Course(last_event_id, self._retry, connection)
        timeout = httpx.Timeout(silence_s, connect=CONNECT_S)
        while True:
            try:
                with connect_sse(
                    self._http, "GET", events.PATH, headers=course.headers(), timeout=timeout
                ) as source:
                    if source.response.is_success:
                        course.begun()
                        for frame in source.iter_sse():
                            if told := course.told(frame):
                                yield told
                        pause = course.ended()
                    else:
                        source.response.read()
                        pause = course.refused(source.response)
            except httpx.HTTPError as error:
                pause = course.failed(error)
            time.sleep(pause)

    def _tried(self, call: Call[Any], take: Callable[[httpx.Response], T], retry: Retry | None = None) -> T:
        attempts = Attempts(call, retry or self._retry)
        while True:
            try:
                with self._http.stream(
                    call.method, call.path, params=call.query, headers=call.head(), content=attempts.chunks()
                ) as response:
                    if response.is_success:
                        with attempts.reading():
                            return take(response)
                    response.read()
                pause = attempts.refused(response)
            except httpx.HTTPError as error:
                pause = attempts.failed(error)
            time.sleep(pause)

    def _call(self, describe: Callable[..., Call[Any]], *args: Any, **options: Any) -> Any:
        return self.send(describe(*args, **options))

    status = method(calls.status)
    model = method(calls.model)
    tensors = method(calls.tensors)
    digests = method(calls.digests)
    versions = method(calls.versions)
    version = method(calls.version)
    current = method(calls.current)
    transactions = method(calls.transactions)
    baselines = method(calls.baselines)
    put_baseline = method(calls.put_baseline)
    delete_baseline = method(calls.delete_baseline)
    read_expert = method(calls.read_expert)
    read_tensor = method(calls.read_tensor)
    put_expert = method(calls.put_expert)
    patch = method(calls.patch)
    rollback = method(calls.rollback)
    reload = method(calls.reload)
    export = method(calls.export)
    operation = method(calls.operation)
    cancel = method(calls.cancel)


class Transaction(Opened):
    """Uploads that are applied together or not at all; made by `Client.transaction`."""

    def __init__(self, client: Client, opening: Call[wire.Transaction]) -> None:
        super().__init__(opening)
        self._client = client

    def __enter__(self) -> Self:
        self._id = self._client.send(self._opening).id
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.ended:
            return
        if error is not None:
            self._abandon(error)
            return
        try:
            self.commit()
        except BaseException as refused:
            self._abandon(refused)
            raise

    def commit(self, if_match: int | str | None = None) -> Receipt:
        """Apply all of it now; `with` does so at its end. If this fails one can go on and try again."""
        self._receipt = self._client.send(calls.commit(self.id, if_match=if_match))
        return self._receipt

    def abort(self) -> None:
        """Drop what was uploaded."""
        self._client.send(calls.abort(self.id))
        self._aborted = True

    def _abandon(self, error: BaseException) -> None:
        try:
            self._client.send(calls.abort(self.id), HURRIED)
        except GraftError as why:
            self._left_open(error, why)

    def _call(self, describe: Callable[..., Call[Any]], *args: Any, **options: Any) -> Any:
        return self._client.send(describe(self.id, *args, **options))

    put_expert = method_of_id(calls.stage_expert)
    patch = method_of_id(calls.stage_patches)
    prepare = method_of_id(calls.prepare)
    state = method_of_id(calls.transaction_state)
