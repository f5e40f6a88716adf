"""Read-back: weights in checkpoint coordinates, gathered from where the kernels read them."""

import json
import mmap
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel

from loaders.engine.checkpoint import TORCH_DTYPE
from loaders.engine.layout import Correspondence, Layout
from loaders.engine.move import Scatter, bits_of, read
from loaders.staged import refuse_full_disk
from schemas.bridge import ReadResult, ReadTensor
from schemas.problems import Code, ProblemError

if TYPE_CHECKING:
    from loaders.engine.atlas import Atlas, Site


class ReadPart(BaseModel):
    """What one rank wrote into the file of a read-back."""

    version: int
    nbytes: int
    """Size of the whole file."""
    held: tuple[tuple[int, int], ...]
    """Of each tensor: elements written by this rank, and elements in all."""


def whole(parts: Sequence[ReadPart]) -> ReadResult:
    """The result of all ranks, which wrote into one file.

    Raises ProblemError if they were at different versions, or if elements are on no rank.
    """
    if len({part.version for part in parts}) != 1:
        raise ProblemError(Code.BUSY, "a commit came in between")
    for held in zip(*(part.held for part in parts), strict=True):
        found, wanted = sum(count for count, _ in held), held[0][1]
        if found < wanted:
            raise ProblemError(Code.TENSOR_UNSUPPORTED, f"{found} of {wanted} elements are on the engine")
    return ReadResult(version=parts[0].version, nbytes=parts[0].nbytes)


def gather(atlas: "Atlas", wanted: ReadTensor, out: torch.Tensor) -> int:
    """Write what this rank holds of a checkpoint tensor (or one expert's slice) to its places in `out`.

    `out` is flat, of the tensor's dtype and size. Returns the number of elements written.

    What no rank holds comes from the checkpoint's files, and every rank writes the same.

    Raises ProblemError if the rank does not hold them as they are stored.
    """
    length = out.numel()
    begin = (wanted.expert or 0) * length
    if not wanted.loaded:
        bits_of(out).copy_(bits_of(atlas.checkpoint.read(wanted.tensor))[begin : begin + length])
        return length
    taken: list[Layout] = []
    for region in atlas.regions.get(wanted.tensor, ()):
        part = region.map.within(begin, length)
        if part is None:
            continue
        moved = Layout(part.src.offset - begin, part.src.size, part.src.stride)
        held = torch.empty(part.dst.numel, dtype=region.dst_dtype)
        apart = Correspondence(Layout.contiguous(part.dst.size), part.dst)
        _take(atlas, atlas.sites[region.parameter], apart, bits_of(held))
        moved.view(out).copy_(region.back(held).view(moved.size))
        taken.append(moved)
    return _distinct(taken, length) if taken else 0


def _distinct(parts: list[Layout], length: int) -> int:
    """How many positions the parts cover; an element may stand in several places."""
    if len(parts) == 1:
        return parts[0].numel
    covered = torch.zeros(length, dtype=torch.bool)
    for part in parts:
        part.view(covered).fill_(True)
    return int(covered.sum())


def _take(atlas: "Atlas", site: "Site", part: Correspondence, out: torch.Tensor) -> None:
    for target, spot in site.places():
        if spot.is_identity and target in atlas.targets:
            part.src.view(out).copy_(part.dst.view(bits_of(atlas.targets[target])))
            return
    for target, spot in site.spots:
        values = read(atlas.targets[target], Scatter(spot.positions(part.dst.positions())))
        part.src.view(out).copy_(values.view(part.src.size))
        return
    raise ProblemError(Code.TENSOR_UNSUPPORTED, f"{site.name} cannot be read: {site.unsupported}")


def write_part(
    path: Path, atlas: "Atlas", wanted: tuple[ReadTensor, ...], metadata: dict[str, str]
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Write this rank's part of a safetensors file that all ranks write together.

    Every rank writes the same header and its own elements. Returns the size of the file
    and what was written of each tensor, as in ReadPart.

    Raises ProblemError `disk_full` if there is no room for the file, and OSError.
    """
    header, places = _arranged(atlas, wanted, metadata)
    size = len(header) + sum(nbytes for _, nbytes in places)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if size:
            # Room is made first: a mapped write to a full disk would kill the worker.
            with refuse_full_disk():
                os.posix_fallocate(handle, 0, size)
        os.pwrite(handle, header, 0)
        shared = mmap.mmap(handle, size)
    finally:
        os.close(handle)
    held = []
    for item, (offset, nbytes) in zip(wanted, places, strict=True):
        dtype = TORCH_DTYPE[atlas.checkpoint.tensors[item.tensor].dtype]
        count = nbytes // dtype.itemsize
        if count:
            out = torch.frombuffer(shared, dtype=dtype, count=count, offset=len(header) + offset)
            held.append((gather(atlas, item, out), count))
        else:
            held.append((0, 0))
    shared.flush()
    return size, tuple(held)


def _arranged(
    atlas: "Atlas", wanted: tuple[ReadTensor, ...], metadata: dict[str, str]
) -> tuple[bytes, list[tuple[int, int]]]:
    """The header of the file with its length, and offset and size of each tensor in the data.

    Wider elements come first, so that every tensor is aligned.
    """
    bases = [atlas.checkpoint.tensors[item.tensor] for item in wanted]
    order = sorted(range(len(wanted)), key=lambda index: -bases[index].dtype.nbytes)
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    places = [(0, 0)] * len(wanted)
    offset = 0
    for index in order:
        item, base = wanted[index], bases[index]
        shape = base.shape[1:] if item.expert is not None else base.shape
        nbytes = prod(shape) * base.dtype.nbytes
        places[index] = (offset, nbytes)
        entries[item.name] = {
            "dtype": base.dtype.value,
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places
