"""Read-back: weights in checkpoint coordinates, gathered from where the kernels read them."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from loaders.engine.checkpoint import TORCH_DTYPE
from loaders.engine.layout import Correspondence, Layout
from loaders.engine.move import bits_of, bytes_of
from loaders.staged import refuse_full_disk
from schemas.bridge import ReadTensor
from schemas.problems import Code, ProblemError

if TYPE_CHECKING:
    from loaders.engine.atlas import Atlas, Site


def gather(atlas: "Atlas", wanted: ReadTensor) -> torch.Tensor:
    """One checkpoint tensor (or one expert's slice) as this rank holds it, flat.

    Raises ProblemError if the tensor is not held on this rank whole and as it is stored.
    """
    base = atlas.checkpoint.tensors[wanted.tensor]
    rows = base.shape[0] if wanted.expert is not None else 1
    length = base.numel // rows
    begin = (wanted.expert or 0) * length
    out = torch.zeros(length, dtype=TORCH_DTYPE[base.dtype])
    taken: list[Layout] = []
    for region in atlas.regions.get(wanted.tensor, ()):
        part = region.map.within(begin, length)
        if part is None:
            continue
        if region.converted is not None:
            raise ProblemError(Code.TENSOR_UNSUPPORTED, f"{wanted.tensor}: {region.converted}")
        moved = Layout(part.src.offset - begin, part.src.size, part.src.stride)
        _take(atlas, atlas.sites[region.parameter], Correspondence(moved, part.dst), bits_of(out))
        taken.append(moved)
    held = _distinct(taken, length)
    if held < length:
        raise ProblemError(
            Code.TENSOR_UNSUPPORTED, f"{wanted.tensor}: {held} of {length} elements are on this rank"
        )
    return out


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
        if spot.is_identity:
            part.src.view(out).copy_(part.dst.view(bits_of(atlas.targets[target])))
            return
    for target, spot in site.spots:
        values = bits_of(atlas.targets[target])[spot.positions(part.dst.positions())]
        part.src.view(out).copy_(values.view(part.src.size))
        return
    raise ProblemError(Code.TENSOR_UNSUPPORTED, f"{site.name} cannot be read: {site.unsupported}")


def write_safetensors(
    path: Path, atlas: "Atlas", wanted: tuple[ReadTensor, ...], metadata: dict[str, str]
) -> int:
    """Gather and write one tensor after the other; returns the bytes of the file.

    Raises ProblemError `disk_full`, or OSError, if the file cannot be written.
    """
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for item in wanted:
        base = atlas.checkpoint.tensors[item.tensor]
        shape = base.shape[1:] if item.expert is not None else base.shape
        nbytes = int(torch.Size(shape).numel()) * base.dtype.nbytes
        header[item.name] = {
            "dtype": base.dtype.value,
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with refuse_full_disk(), path.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        for item in wanted:
            handle.write(bytes_of(gather(atlas, item)))
        handle.flush()
        return os.fstat(handle.fileno()).st_size
