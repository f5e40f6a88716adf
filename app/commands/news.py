"""What a person wants to see of the stream of events, in lines."""

from collections.abc import Iterator
from datetime import datetime

from rich.filesize import decimal

from app.remote.errors import Unreachable
from app.remote.waiting import Client
from schemas.events import (
    BaselineEvent,
    EngineEvent,
    Event,
    OperationEvent,
    ResetEvent,
    TransactionEvent,
    UploadEvent,
    UploadState,
    VersionEvent,
)
from schemas.operations import OperationState
from schemas.transactions import State
from schemas.versions import VersionEntry

Line = tuple[datetime, str]
"""When something happened, and what."""

_UNDER_WAY = frozenset({State.OPEN, State.PREPARING, State.PREPARED, State.COMMITTING})


class News:
    """Goes along a stream: each thing that happens is one line, however often it is told.

    After a `reset` the state is read: versions that came since the last one that was told, if there was
    one, else the current one; and the engine.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._behind = False
        """Whether the state is still to be read."""
        self._ledger: str | None = None
        self._version: int | None = None
        """The last one that was told, of this ledger."""
        self._engine = ""
        self._begun: set[str] = set()
        """Transactions and operations under way."""

    def lines(self, event: Event) -> Iterator[Line]:
        """What there is to say of the next event. Raises Refused."""
        if isinstance(event, ResetEvent):
            self._behind = True
            self._begun.clear()
        if self._behind:
            yield from self._state(event.at)
        match event:
            case VersionEvent() if not self._behind:  # else it will be read
                yield from self._next(event.version)
            case BaselineEvent():
                yield event.at, f"baseline     {event.name}: {_now(event.version)}"
            case TransactionEvent():
                yield from self._transaction(event)
            case OperationEvent():
                yield from self._operation(event)
            case UploadEvent(state=UploadState.REFUSED):
                yield event.at, f"upload       {_place(event)}: refused, {event.code}"
            case EngineEvent():
                yield from self._seen(event)

    def _state(self, at: datetime) -> Iterator[Line]:
        try:
            status = self._client.status()
            history = self._client.versions()
        except Unreachable:
            return  # the stream is lost too, or the next event will find somebody
        self._behind = False
        if history.ledger != self._ledger:
            self._ledger, self._version = history.ledger, history.current - 1
        for entry in history.versions:
            yield from self._next(entry)
        self._engine = ""
        seen = EngineEvent(at=at, writable=status.writable, busy=status.busy, engine=status.engine)
        yield from self._seen(seen)

    def _next(self, entry: VersionEntry) -> Iterator[Line]:
        if self._version is None or entry.version > self._version:
            self._version = entry.version
            yield entry.created_at, f"version      {_version(entry)}"

    def _seen(self, event: EngineEvent) -> Iterator[Line]:
        line = f"engine       {_engine(event)}"
        if line != self._engine:
            self._engine = line
            yield event.at, line

    def _transaction(self, event: TransactionEvent) -> Iterator[Line]:
        what = event.id + (f", {event.label}" if event.label else "")
        if event.state not in _UNDER_WAY:
            self._begun.discard(event.id)
            yield event.at, f"transaction  {what}: {event.state}{_outcome(event)}"
        elif event.id not in self._begun:
            self._begun.add(event.id)
            if event.state is State.OPEN:
                yield event.at, f"transaction  {what}: opened"

    def _operation(self, event: OperationEvent) -> Iterator[Line]:
        operation = event.operation
        what = f"{operation.kind} {operation.id}"
        if operation.state is not OperationState.RUNNING:
            self._begun.discard(operation.id)
            yield event.at, f"operation    {what}: {operation.state}{_outcome(event)}"
        elif operation.id not in self._begun:
            self._begun.add(operation.id)
            yield event.at, f"operation    {what}: begun"


def _now(version: int | None) -> str:
    return "gone" if version is None else f"version {version}"


def _version(entry: VersionEntry) -> str:
    label = f", {entry.label}" if entry.label else ""
    back = f" to {entry.restores}" if entry.restores is not None else ""
    size = f"; {entry.tensors} tensors, {decimal(entry.nbytes.written)}" if entry.nbytes else ""
    timing = entry.timing
    stall = f"; stall {timing.pause_ms + timing.apply_ms + timing.resume_ms:.1f} ms" if timing else ""
    return f"{entry.version}: {entry.kind}{back}{label}{size}{stall}"


def _engine(event: EngineEvent) -> str:
    if event.writable:
        return "writable, paused" if event.engine.paused and not event.busy else "writable"
    progress = event.engine.progress
    return f"not writable: {event.engine.problem}" + (f" ({progress.phase})" if progress else "")


def _place(event: UploadEvent) -> str:
    return "batch" if event.expert is None else f"expert {event.layer}/{event.expert}"


def _outcome(event: TransactionEvent | OperationEvent) -> str:
    problem = event.problem if isinstance(event, TransactionEvent) else event.operation.problem
    if problem is not None:
        return f", {problem.code}: {problem.detail}"
    return f" as version {event.version}" if event.version is not None else ""
