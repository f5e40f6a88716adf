"""What admin and engine say to each other: paths, offsets and digests, never tensors.

The bridge is a plugin in vLLM's API server. It asks every worker by RPC and answers
with what every rank said. All bodies are JSON; the caller's nonce comes back with
each rank's answer, so that an answer to an earlier question is noticed.
"""

from enum import StrEnum

from pydantic import Field

from schemas.base import Digest, Output, Version
from schemas.dtypes import Dtype
from schemas.model import CheckpointTensor, ModelInfo
from schemas.problems import Code
from schemas.transactions import InFlight

PREFIX = "/graft/v1"
"""Where the bridge's routes are mounted on vLLM's API server."""
PROTOCOL = 4
"""Number of this protocol; admin and bridge must agree."""


class Span(Output):
    """Bytes of a staged file, counted from its start."""

    offset: int
    nbytes: int


class IndexSpan(Span):
    """Flat indices in a staged file."""

    dtype: Dtype


class TensorWrite(Output):
    """New values for one checkpoint tensor, or for one expert's slice of it."""

    tensor: str
    expert: int | None = None
    """Slice `tensor[expert]` of a tensor that stacks experts on its first dimension."""
    values: Span
    indices: IndexSpan | None = None
    """Flat positions in the tensor, or with `expert` in its slice; none: all elements."""
    experts: tuple[int, ...] | None = None
    """Where the tensor stacks experts, those that `indices` are positions of; none: any of them.

    The engine needs none of it: it is for who asks later what a version has touched.
    """


class StagedUpload(Output):
    """A checked body on disk and the writes that it stands for, in order."""

    external: bool = False
    """Whether the file is somebody else's: it is read where it lies, and neither kept nor deleted."""
    path: str
    nbytes: int
    blake3: Digest
    writes: tuple[TensorWrite, ...]


class PrepareRequest(Output):
    """Phase one: from staged files, or from the undo of the versions after `restore`."""

    nonce: str
    key: str
    """Names the prepared work in later calls."""
    base_version: Version
    uploads: tuple[StagedUpload, ...] = ()
    restore: Version | None = None
    replay: bool = False
    """The engine serves nobody yet, so the moves get neither undo nor digest.

    Half the memory, but no way back. Digests tell what came of it, if any were recorded at the version.
    """
    undo_most: int | None = None
    """Bytes of undo per rank for which there is room; none: as much as it takes."""
    timeout_s: float


class CommitRequest(Output):
    """Phase two: move what was prepared under `key`; the engine is then at `version`."""

    nonce: str
    key: str
    version: Version
    in_flight: InFlight = InFlight.RECOMPUTE
    drain_timeout_s: float = 60.0
    """How long `wait` waits for running requests to end."""


class KeyRequest(Output):
    """Drop what was prepared under `key`."""

    nonce: str
    key: str


class ForgetRequest(Output):
    """Drop the undo of these versions."""

    nonce: str
    versions: tuple[Version, ...]


class DigestsRequest(Output):
    """Digests of runtime tensors whose names start with `prefix`."""

    nonce: str
    prefix: str = ""


class ReadRequest(Output):
    """Read checkpoint tensors back into a safetensors file at `path`.

    `tensors` pairs the name in the file with what to read.
    """

    nonce: str
    path: str
    tensors: tuple["ReadTensor", ...]
    metadata: dict[str, str] = Field(default_factory=dict)
    """What the file's header says beside the tensors."""


class ReadTensor(Output):
    """One tensor to read back, whole or one expert's slice."""

    name: str
    tensor: str
    expert: int | None = None
    loaded: bool = True
    """Whether a rank holds it; what none does is read from the checkpoint's files."""


class RankError(Output):
    """Why a rank could not do what it was asked."""

    code: Code
    detail: str


class RankReport(Output):
    """One rank's answer to a prepare, commit or undo."""

    nonce: str
    """Of the request that the rank worked on."""
    rank: int
    boot: str
    ok: bool
    error: RankError | None = None
    tensors: int = 0
    elements: int = 0
    nbytes: int = 0
    """Bytes written (or to be written) into runtime memory."""
    undo_nbytes: int = 0
    validate_ms: float = 0.0
    apply_ms: float = 0.0
    digest: Digest | None = None
    """Over the digests of what the commit touched, in the order of names."""


class Outcome(StrEnum):
    """How a bridge call that changes the engine ended."""

    DONE = "done"
    FAILED = "failed"
    """Nothing was written, or everything that was written is undone."""
    UNKNOWN = "unknown"
    """Some rank could not be brought back; generation stays paused."""


class PrepareResult(Output):
    """Outcome of phase one."""

    outcome: Outcome
    ranks: tuple[RankReport, ...]
    prepare_ms: float


class CommitResult(Output):
    """Outcome of phase two."""

    outcome: Outcome
    ranks: tuple[RankReport, ...]
    pause_ms: float
    apply_ms: float
    resume_ms: float
    caches: dict[str, str]
    """Cache name → `reset`, `none` (there is no such cache), `failed`, or `mixed`: to be reset when
    the last request that has KV of the old weights has ended."""
    in_flight: str
    """What happened to running requests, for example `recomputed`."""
    detail: str | None = None
    code: Code | None = None
    """Why the commit was not begun, if it was not: no weight was written."""


class RankState(Output):
    """One rank at this moment."""

    rank: int
    boot: str
    version: Version
    prepared: tuple[str, ...]
    undo: dict[str, int]
    """Version (as text) → bytes held to step back from it to the one before."""
    undo_nbytes: int
    prepared_nbytes: int
    """Bytes of what is prepared, and until the next change is, of what the last one has replaced."""


class EngineState(Output):
    """What `GET /state` answers; cheap enough to poll."""

    protocol: int = PROTOCOL
    ranks: tuple[RankState, ...]
    paused: bool
    weight_version: str


class ParallelLayout(Output):
    """How the model is spread."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False


class EngineDescription(Output):
    """What `GET /describe` answers; fixed for the life of an engine."""

    protocol: int = PROTOCOL
    vllm_version: str
    torch_version: str
    parallel: ParallelLayout
    model: ModelInfo
    tensors: tuple[CheckpointTensor, ...]
    checkpoint: str | None = None
    """Folder of the safetensors files that the engine was loaded from."""


class TensorDigest(Output):
    """Digest of one runtime tensor, or of a module's output on a fixed probe."""

    name: str
    blake3: Digest
    opaque: bool = False


class RankDigests(Output):
    """Digests of one rank."""

    rank: int
    boot: str
    tensors: tuple[TensorDigest, ...]


class DigestsResult(Output):
    """Digests of all ranks at one version."""

    version: Version
    ranks: tuple[RankDigests, ...]


class ReadResult(Output):
    """A finished read-back; the file at the asked path holds weights of `version` only."""

    version: Version
    nbytes: int
