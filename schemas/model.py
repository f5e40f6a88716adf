"""What can be updated: the checkpoint's tensors as the engine reports them."""

from enum import StrEnum

from schemas.base import Output
from schemas.dtypes import Dtype


class Treatment(StrEnum):
    """How a checkpoint tensor reaches the memory that the kernel reads."""

    DIRECT = "direct"
    """Elements are written where the kernel reads them."""
    REBUILT = "rebuilt"
    """The module's derived state is built anew from patched weights and swapped in."""
    UNSUPPORTED = "unsupported"
    """Not updatable on this engine; `reason` says why."""


class CheckpointTensor(Output):
    """One tensor of the checkpoint, and what Graft can do with it."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    treatment: Treatment
    reason: str | None = None
    loaded: bool = True
    """Whether any rank takes it from the checkpoint; if none does, it is `unsupported`."""
    runtime_dtype: Dtype | None = None
    """What the engine holds it as, if its loader casts it; new values are cast in the same way."""
    lossless: bool = True
    """Whether the checkpoint's values can be read back from what the engine holds."""
    tied_to: str | None = None
    """Another checkpoint tensor that lives in the same memory on the engine."""


class ExpertTensor(Output):
    """One of the tensors that make up an expert, named as in an expert upload."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()


class ModelInfo(Output):
    """The model that the engine serves."""

    model: str
    architecture: str
    dtype: str
    quantization: str | None
    layers: int
    experts: int
    """Experts per mixture layer; 0 for a dense model."""
