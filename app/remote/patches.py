"""Patches: new values for one checkpoint tensor, whole or at flat positions, and batches of them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from app.remote.bodies import Body, Part, safetensors
from app.remote.tensors import Array, Bits, Tensor
from schemas.dtypes import Dtype
from schemas.patches import Patch

METADATA_KEY = "patches"


@dataclass(frozen=True)
class Dense:
    """All values of the checkpoint tensor `name`."""

    name: str
    values: Array


@dataclass(frozen=True)
class Sparse:
    """New `values` at flat, row-major positions `indices` (int32 or int64) of a tensor of `shape`."""

    name: str
    shape: tuple[int, ...]
    indices: Array
    values: Array


Weights = Mapping[str, Array] | Sequence[Dense | Sparse] | Path | bytes | Body
"""What an upload can be made of: tensors by name, patches, a safetensors file, or what such a file holds."""


def body_of(weights: Weights) -> Body:
    """The body that an upload of `weights` has. Raises OSError for a file, TypeError for odd arrays."""
    if isinstance(weights, Body):
        return weights
    if isinstance(weights, Path):
        return Body.of_file(weights)
    if isinstance(weights, bytes):
        return Body.of_bytes(weights)
    if isinstance(weights, Mapping):
        return Body.of_tensors(weights)
    return batch(weights)


def batch(patches: Iterable[Dense | Sparse]) -> Body:
    """A patch batch; patches apply in their order."""
    listed: list[Patch] = []
    parts: dict[str, Part] = {}
    for number, patch in enumerate(patches):
        values = Tensor.of(patch.values)
        shape = patch.shape if isinstance(patch, Sparse) else values.shape
        parts[f"{number}.values"] = values
        indices = None
        if isinstance(patch, Sparse):
            indices = f"{number}.indices"
            parts[indices] = Tensor.of(patch.indices)
        listed.append(
            Patch(
                name=patch.name, shape=shape, dtype=values.dtype, values=f"{number}.values", indices=indices
            )
        )
    return safetensors(parts, {METADATA_KEY: list_text(listed)})


def list_text(patches: Iterable[Patch]) -> str:
    """The list as it stands in a body's metadata."""
    return json.dumps([patch.model_dump(mode="json", exclude_none=True) for patch in patches])


def changes(old: Mapping[str, Array], new: Mapping[str, Array]) -> Iterator[Dense | Sparse]:
    """Patches that lead from `old` to `new`, bit for bit, each in the smaller of the two forms.

    Both have the same tensors. Raises ValueError if a name, shape or dtype is not in both.
    """
    if old.keys() != new.keys():
        odd = sorted(old.keys() ^ new.keys())[0]
        raise ValueError(f"{odd} is only in one of the two")
    for name, array in new.items():
        before, after = Tensor.of(old[name]), Tensor.of(array)
        if (before.dtype, before.shape) != (after.dtype, after.shape):
            raise ValueError(f"{name} has another dtype or shape than before")
        changed = change(name, before, after)
        if changed is not None:
            yield changed


def change(name: str, before: Tensor, after: Tensor) -> Dense | Sparse | None:
    """The patch from one value of a tensor to another of the same dtype and shape; none if they are equal."""
    bits = after.bits()
    where = differing(before.bits(), bits)
    if not where.size:
        return None
    if sparse_nbytes(where.size, after.numel, after.dtype) >= after.nbytes:
        return Dense(name, after)
    values = Tensor(after.dtype, where.shape, bits[where])
    return Sparse(name, after.shape, where.astype(index_type(after.numel)), values)


def differing(before: Bits, after: Bits) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Flat positions at which bits differ, ascending."""
    return np.flatnonzero(before != after).astype(np.int64, copy=False)


def index_type(numel: int) -> np.dtype[np.signedinteger]:
    """The smallest type of positions in a tensor of so many elements."""
    return np.dtype("<i4") if numel <= 1 << 31 else np.dtype("<i8")


def sparse_nbytes(count: int, numel: int, dtype: Dtype) -> int:
    """Bytes that `count` changed elements of a tensor take as a sparse patch."""
    return count * (dtype.nbytes + index_type(numel).itemsize)
