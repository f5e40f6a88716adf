"""Operations on the wire: work that is followed by an id instead of waited for."""

from datetime import datetime
from enum import StrEnum

from schemas.base import Output
from schemas.problems import Problem
from schemas.transactions import Receipt


class OperationKind(StrEnum):
    """What is being done."""

    COMMIT = "commit"
    ROLLBACK = "rollback"


class OperationState(StrEnum):
    """Where it stands."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """The service ended before it did, and it changed nothing."""


class Operation(Output):
    """One operation; `receipt` once it is done, `problem` once it has failed."""

    id: str
    kind: OperationKind
    state: OperationState
    created_at: datetime
    ended_at: datetime | None = None
    transaction: str | None = None
    receipt: Receipt | None = None
    problem: Problem | None = None
