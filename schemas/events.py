"""What `GET /v1/events` tells. Every event says how something stands, not what changed of it."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Output, Version
from schemas.operations import Operation
from schemas.problems import Code, Problem
from schemas.status import EngineStatus, Rooms
from schemas.transactions import State
from schemas.versions import VersionEntry


def _now() -> datetime:
    return datetime.now(UTC)


class Happening(Output):
    """What all events say."""

    at: datetime = Field(default_factory=_now)
    """When it happened, or was seen."""


class ResetEvent(Happening):
    """Nothing is told of what came before: read the state anew, and follow on from here."""

    type: Literal["reset"] = "reset"


class VersionEvent(Happening):
    """A commit, rollback or reload is done; its version is the current one."""

    type: Literal["version"] = "version"
    version: VersionEntry


class BaselineEvent(Happening):
    """A name stands for a version now; none: it is gone."""

    type: Literal["baseline"] = "baseline"
    name: str
    version: Version | None


class TransactionEvent(Happening):
    """A transaction was opened, changed or has ended; `GET /v1/transactions/{id}` has all of it."""

    type: Literal["transaction"] = "transaction"
    id: str
    state: State
    label: str | None
    created_at: datetime
    expires_at: datetime
    uploads: int
    nbytes: int
    version: Version | None
    """What it was committed as."""
    problem: Problem | None


class UploadState(StrEnum):
    """Where a body stands."""

    RECEIVING = "receiving"
    ACCEPTED = "accepted"
    REFUSED = "refused"


class UploadEvent(Happening):
    """A body is arriving, or was accepted or refused; some of them a second while it arrives."""

    type: Literal["upload"] = "upload"
    id: str
    """Of this attempt; it is known nowhere else."""
    state: UploadState
    transaction: str | None
    """None for a one-request upload until it is accepted."""
    layer: int | None
    expert: int | None
    received: int
    """Bytes, of `nbytes` if these were announced."""
    nbytes: int | None
    code: Code | None = None
    """Why it was refused; none if another release has refused it for a reason that this one does not know."""


class OperationEvent(Happening):
    """An operation began, came further or ended; without its receipt, which `GET /v1/operations/{id}` has."""

    type: Literal["operation"] = "operation"
    operation: Operation
    version: Version | None
    """What came of it, if it is done and changed something."""


class EngineEvent(Happening):
    """The engine is seen otherwise than before."""

    type: Literal["engine"] = "engine"
    writable: bool
    busy: bool
    engine: EngineStatus


class StorageEvent(Happening):
    """Bytes that are in use have changed."""

    type: Literal["storage"] = "storage"
    storage: Rooms


Event = Annotated[
    ResetEvent
    | VersionEvent
    | BaselineEvent
    | TransactionEvent
    | UploadEvent
    | OperationEvent
    | EngineEvent
    | StorageEvent,
    Field(discriminator="type"),
]
"""The data of one event; `type` is also the name of the event."""
