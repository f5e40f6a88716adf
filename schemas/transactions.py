"""Transactions on the wire: how they are opened, what was uploaded, and the receipt."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from schemas.base import Digest, Input, Output, Version
from schemas.problems import Problem

Label = Annotated[str, Field(max_length=256)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class InFlight(StrEnum):
    """What happens to requests that run while weights change."""

    RECOMPUTE = "recompute"
    """They are preempted, and their KV is computed again with the new weights."""
    WAIT = "wait"
    """They end first, within a bound; new ones queue meanwhile."""
    ABORT = "abort"
    """They are ended."""
    KEEP = "keep"
    """They go on with KV of the old weights, which new ones can hit until the last of them has ended."""


class State(StrEnum):
    """Where a transaction stands."""

    OPEN = "open"
    PREPARING = "preparing"
    PREPARED = "prepared"
    COMMITTING = "committing"
    COMMITTED = "committed"
    ABORTED = "aborted"
    FAILED = "failed"
    EXPIRED = "expired"
    INTERRUPTED = "interrupted"


class FlightOptions(Input):
    """What a change does with requests that run."""

    in_flight: InFlight = InFlight.RECOMPUTE
    """What happens to requests that run."""
    drain_timeout_s: Annotated[float, Field(gt=0, le=3600)] | None = None
    """How long `wait` waits for running requests to end; none: as the service is set."""


RECOMPUTE = FlightOptions()
"""No request is lost: those that run are computed again with the new weights."""


class TransactionOptions(FlightOptions):
    """How to open a transaction. One-request uploads take the same as query parameters."""

    base_version: Version | None = None
    """Refuse to commit on any other version."""
    label: Label | None = None
    """A text of the client's own, kept in the history."""
    expires_in_s: Seconds | None = None
    """How long it stays open if it is not committed; none: as the service is set."""
    allow_nonfinite: bool = False
    """Accept NaN and infinity among the values."""


class ExpertOptions(Input):
    """Query parameters of an expert upload into a transaction."""

    partial: bool = False
    """Allow a subset of the expert's tensors, as a packed weight without its scale.

    The last upload of an expert counts alone, partial or not.
    """


class OneShotExpertOptions(TransactionOptions, ExpertOptions):
    """Query parameters of an expert uploaded and committed in one request."""


class UploadKind(StrEnum):
    """What a body turned out to be."""

    EXPERT = "expert"
    PATCHES = "patches"
    PLAIN = "plain"


class Upload(Output):
    """One accepted body. `number` is its place in the order of application, from 1."""

    number: int
    kind: UploadKind
    layer: int | None = None
    expert: int | None = None
    blake3: Digest
    nbytes: int
    """Size of the body."""
    tensors: int
    elements: int


class Preparation(Output):
    """What phase one found on every rank."""

    version: Version
    """The version that the work is bound to."""
    prepare_ms: float
    nbytes: int
    """Bytes to be written, over all ranks."""
    undo_nbytes: int
    """Bytes needed for undo on the rank that needs most."""
    ranks: tuple["RankWork", ...]


class RankWork(Output):
    """What one rank has to write, or wrote."""

    rank: int
    boot: str
    tensors: int
    elements: int
    nbytes: int
    undo_nbytes: int
    digest: Digest | None = None


class Timing(Output):
    """Milliseconds spent; `pause` is how long stopping generation took, with `wait` until it had ended."""

    validate_ms: float
    prepare_ms: float
    pause_ms: float
    apply_ms: float
    resume_ms: float


class Volume(Output):
    """Bytes moved, over all ranks."""

    uploaded: int
    written: int
    undo: int


class Receipt(Output):
    """What a commit or rollback did."""

    version: Version
    base_version: Version
    restores: Version | None = None
    """The version whose weights a rollback put back."""
    path: str | None = None
    """The checkpoint folder that a reload read."""
    transaction: str | None = None
    label: str | None = None
    tensors: int
    experts: int
    nbytes: Volume
    timing: Timing
    ranks: tuple[RankWork, ...]
    caches: dict[str, str]
    in_flight: str
    uploads: tuple[Upload, ...] = ()
    note: str | None = None


class Transaction(Output):
    """A transaction as it stands."""

    id: str
    state: State
    label: str | None
    base_version: Version | None
    in_flight: InFlight
    allow_nonfinite: bool
    created_at: datetime
    expires_at: datetime
    nbytes: int
    uploads: tuple[Upload, ...]
    preparation: Preparation | None
    receipt: Receipt | None
    problem: Problem | None
    """Why it failed."""


class TransactionList(Output):
    """All transactions that are still remembered, oldest first."""

    transactions: tuple[Transaction, ...]


class Nothing(Input):
    """The body of a request that has nothing to say: empty, or `{}`."""
