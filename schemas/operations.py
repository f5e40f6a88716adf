"""Operations on the wire: work that is followed by an id instead of waited for."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from schemas.base import Input, Output, Version
from schemas.problems import Problem
from schemas.transactions import Receipt


class OperationKind(StrEnum):
    """What is being done."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    RELOAD = "reload"
    EXPORT = "export"


class OperationState(StrEnum):
    """Where it stands."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """It was ended from outside, and nothing is left of it."""
    INTERRUPTED = "interrupted"
    """The service ended before it did, and it changed nothing."""


class ExportRequest(Input):
    """Where a version goes to, as a checkpoint folder."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """A folder on the server that does not exist yet, in one that does."""


class ExportProgress(Output):
    """How far an export has come."""

    version: Version
    path: str
    files: int
    """Files with weights that are complete, of `of_files`."""
    of_files: int
    nbytes: int
    """Bytes of these files, of `of_nbytes`."""
    of_nbytes: int


class Operation(Output):
    """One operation; `receipt` once a change is done, `problem` once it has failed."""

    id: str
    kind: OperationKind
    state: OperationState
    created_at: datetime
    ended_at: datetime | None = None
    transaction: str | None = None
    export: ExportProgress | None = None
    receipt: Receipt | None = None
    problem: Problem | None = None
