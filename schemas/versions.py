"""Versions, rollbacks and baselines on the wire."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from schemas.base import Input, Output, Version
from schemas.transactions import FlightOptions, Label, Receipt, Timing, Volume

BaselineName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class VersionKind(StrEnum):
    """How a version came to be."""

    BASE = "base"
    COMMIT = "commit"
    ROLLBACK = "rollback"
    RELOAD = "reload"
    ADOPTED = "adopted"
    """The engine ran it already when this service first met it."""


class VersionEntry(Output):
    """One version of the weights."""

    version: Version
    kind: VersionKind
    created_at: datetime
    base_version: Version | None = None
    restores: Version | None = None
    transaction: str | None = None
    label: str | None = None
    path: str | None = None
    """The checkpoint folder that a reload read."""
    held: bool
    """Whether it can be rolled back to."""
    undo_nbytes: int
    """Bytes that the engine holds, per rank, to step back from this version."""
    baselines: tuple[str, ...] = ()
    tensors: int = 0
    """Checkpoint tensors that it wrote, as its receipt says; likewise the next three."""
    experts: int = 0
    nbytes: Volume | None = None
    timing: Timing | None = None


class VersionDetail(VersionEntry):
    """One version with its receipt."""

    receipt: Receipt | None = None


class CurrentVersion(VersionDetail):
    """The version that the engine serves; `ledger` changes when the history starts anew."""

    ledger: str


class VersionList(Output):
    """The history, oldest first."""

    ledger: str
    current: Version
    versions: tuple[VersionEntry, ...]


class RollbackRequest(FlightOptions):
    """What to go back to: exactly one of the two."""

    to_version: Version | None = None
    to_baseline: BaselineName | None = None

    @model_validator(mode="after")
    def _one(self) -> "RollbackRequest":
        if (self.to_version is None) == (self.to_baseline is None):
            raise ValueError("give exactly one of to_version and to_baseline")
        return self


class ReloadRequest(FlightOptions):
    """What to read anew, from disk."""

    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """A checkpoint folder on the server; none: the one that the current version goes back to."""
    base_version: Version | None = None
    """Refuse to reload over any other version."""
    label: Label | None = None


class BaselineRequest(Input):
    """Which version to name; none: the current one."""

    version: Version | None = None


class Baseline(Output):
    """A named version that stays within reach."""

    name: str
    version: Version
    created_at: datetime


class BaselineList(Output):
    """All baselines by name."""

    baselines: tuple[Baseline, ...]
