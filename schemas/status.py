"""Status, health, and the model's tensors on the wire."""

from schemas.base import Output, Version
from schemas.bridge import ParallelLayout
from schemas.model import CheckpointTensor, ExpertTensor, ModelInfo


class Alive(Output):
    """The process runs."""

    status: str = "alive"


class Ready(Output):
    """The engine answered and runs the ledger's current version."""

    status: str = "ready"
    version: Version


class Progress(Output):
    """How far the start of an engine has come, in words."""

    phase: str
    detail: str | None = None
    elapsed_s: float | None = None


class RankStatus(Output):
    """One rank as it was last seen."""

    rank: int
    boot: str
    version: Version
    prepared: int
    undo_nbytes: int
    prepared_nbytes: int
    """Bytes of what is prepared, and until the next change is, of what the last one has replaced."""


class EngineStatus(Output):
    """The engine as it was last seen."""

    url: str
    reachable: bool
    problem: str | None = None
    """Why it cannot be changed right now."""
    paused: bool | None = None
    vllm_version: str | None = None
    torch_version: str | None = None
    parallel: ParallelLayout | None = None
    model: ModelInfo | None = None
    ranks: tuple[RankStatus, ...] = ()
    progress: Progress | None = None
    proved: bool | None = None
    """Whether it had the digests that were recorded at its version when it was brought there.

    False after a replay of a version for which none were recorded, as when all died just after a commit or
    the parallel layout is another: the uploads were found right, what came of them was not compared.
    None until it is there, and where nothing was recorded and nothing had to be replayed.
    """


class Room(Output):
    """Bytes in use, and how many may be."""

    used: int
    budget: int


class Rooms(Output):
    """What is kept, by kind."""

    staged: Room
    """Uploads of open transactions, on disk."""
    undo: Room
    """Undo in the engine's memory, per rank."""
    kept: Room | None = None
    """Blobs of committed versions, where they are kept."""


class Status(Output):
    """Everything an operator asks first."""

    ledger: str
    version: Version | None
    checkpoint: str | None
    """The folder that a reload without a path reads, if the engine has said where it was loaded from."""
    writable: bool
    """Whether a commit would be tried now."""
    busy: bool
    open_transactions: tuple[str, ...]
    storage: Rooms
    engine: EngineStatus


class Model(ModelInfo):
    """The model, and the names of one expert's tensors in uploads."""

    expert_layers: tuple[int, ...]
    """Numbers of the layers that have experts."""
    expert_tensors: tuple[ExpertTensor, ...]
    """As in the first of these layers."""


class LayerExperts(Output):
    """One layer's experts in the order of their numbers."""

    layer: int
    versions: tuple[Version | None, ...]
    """The version that last wrote to each; none if that happened before this history began."""


class ExpertMap(Output):
    """Where the weights of every expert come from, at one version.

    After a rollback that is what it was at the version that was gone back to.
    """

    version: Version
    layers: tuple[LayerExperts, ...]


class TensorPage(Output):
    """Checkpoint tensors in the order of their names."""

    tensors: tuple[CheckpointTensor, ...]
    next: str | None
    """Pass as `after` for the next page; none on the last."""
