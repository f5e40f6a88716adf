"""Tensors on their way to Graft: arrays of numpy or torch as raw bits. Neither torch nor a GPU is needed."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from schemas.dtypes import Dtype

CHUNK_NBYTES = 1 << 20
"""Size of the pieces in which bodies are sent."""

Bits = npt.NDArray[np.unsignedinteger[Any]]
"""Elements as unsigned integers of their width, flat: NaN equals itself and -0 is not 0."""

_NUMPY = {
    np.dtype("bool"): Dtype.BOOL,
    np.dtype("u1"): Dtype.U8,
    np.dtype("i1"): Dtype.I8,
    np.dtype("<u2"): Dtype.U16,
    np.dtype("<i2"): Dtype.I16,
    np.dtype("<f2"): Dtype.F16,
    np.dtype("<u4"): Dtype.U32,
    np.dtype("<i4"): Dtype.I32,
    np.dtype("<f4"): Dtype.F32,
    np.dtype("<u8"): Dtype.U64,
    np.dtype("<i8"): Dtype.I64,
    np.dtype("<f8"): Dtype.F64,
}
_TORCH = {
    "torch.bool": Dtype.BOOL,
    "torch.uint8": Dtype.U8,
    "torch.int8": Dtype.I8,
    "torch.float8_e4m3fn": Dtype.F8_E4M3,
    "torch.float8_e5m2": Dtype.F8_E5M2,
    "torch.float8_e8m0fnu": Dtype.F8_E8M0,
    "torch.uint16": Dtype.U16,
    "torch.int16": Dtype.I16,
    "torch.float16": Dtype.F16,
    "torch.bfloat16": Dtype.BF16,
    "torch.uint32": Dtype.U32,
    "torch.int32": Dtype.I32,
    "torch.float32": Dtype.F32,
    "torch.uint64": Dtype.U64,
    "torch.int64": Dtype.I64,
    "torch.float64": Dtype.F64,
}


class Array(Protocol):
    """A `torch.Tensor`, a numpy array, or a `Tensor`."""

    @property
    def shape(self) -> Any:
        """Sizes of the dimensions."""

    @property
    def dtype(self) -> Any:
        """Type of the elements."""


@dataclass(frozen=True)
class Tensor:
    """An array whose bits stand for elements of `dtype`.

    Made by hand where numpy lacks the type: `Tensor(Dtype.BF16, array.shape, array)` with an array of
    `uint16`. The bits are fetched, from a GPU if need be, when they are sent and not before.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    array: Any

    @classmethod
    def of(cls, array: Array) -> "Tensor":
        """Raises TypeError if it is no array, or of a type that safetensors lacks."""
        if isinstance(array, Tensor):
            return array
        kinds: dict[Any, Dtype] = _NUMPY if isinstance(array, np.ndarray) else _TORCH
        dtype = kinds.get(array.dtype if isinstance(array, np.ndarray) else str(getattr(array, "dtype", "")))
        if dtype is None:
            kind = getattr(array, "dtype", type(array).__name__)
            raise TypeError(
                f"{kind} can't be sent: give a numpy array, a torch tensor, or a Tensor of raw bits"
            )
        return cls(dtype, tuple(int(size) for size in array.shape), array)

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.nbytes

    def bits(self) -> Bits:
        """All elements, flat and row-major; raises ValueError if the array has not as many bytes."""
        if isinstance(self.array, np.ndarray):
            raw = np.ascontiguousarray(self.array).reshape(-1).view(np.uint8)
        else:
            torch = sys.modules["torch"]  # whoever has one of its tensors has imported it
            raw = self.array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if raw.nbytes != self.nbytes:
            raise ValueError(
                f"{self.dtype} of shape {list(self.shape)} takes {self.nbytes} bytes, not {raw.nbytes}"
            )
        return raw.view(f"<u{self.dtype.nbytes}")

    def chunks(self) -> Iterator[bytes]:
        """The bytes in pieces."""
        raw = self.bits().data.cast("B") if self.numel else memoryview(b"")
        for start in range(0, len(raw), CHUNK_NBYTES):
            yield bytes(raw[start : start + CHUNK_NBYTES])
