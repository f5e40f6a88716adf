"""From checked uploads to moves: checkpoint coordinates mapped to this rank's targets."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from loaders.engine.canvas import Canvases, scattered
from loaders.engine.checkpoint import MappedFile
from loaders.engine.layout import Correspondence, Layout
from loaders.engine.move import Move, bits_of
from loaders.engine.points import Points, is_rising
from loaders.engine.provenance import Region
from loaders.engine.shared import SharedWrites
from loaders.engine.spot import Spot
from schemas.bridge import StagedUpload, TensorWrite

if TYPE_CHECKING:
    from loaders.engine.atlas import Atlas, Site

_POSITION_NBYTES = 4
"""Of a single element's position, unless the tensor is larger than such can tell."""
_PIECE = 1 << 18
"""Single elements that are mapped at once: what that takes stays in the processor's cache."""


@dataclass(slots=True)
class Plan:
    """What a transaction writes on this rank, in order, and which sites it touches."""

    moves: list[Move]
    sites: dict[str, "Site"]
    tensors: int
    elements: int


def plan(atlas: "Atlas", uploads: tuple[StagedUpload, ...]) -> Plan:
    """Map every write of the uploads to moves with private values, O(touched elements).

    Raises ValueError if a staged file is not what its upload says, or KeyError for a
    tensor that this rank does not know; both mean that admin and engine disagree.
    Raises ProblemError `tied_tensor` if tensors that share elements are not sent alike.
    """
    planner = _Planner(atlas)
    for upload in uploads:
        staged = MappedFile(Path(upload.path))
        if staged.nbytes != upload.nbytes:
            raise ValueError(f"{upload.path} has {staged.nbytes} bytes, not {upload.nbytes}")
        for write in upload.writes:
            planner.add(staged, write)
    return planner.finish()


def values_nbytes(atlas: "Atlas", uploads: tuple[StagedUpload, ...]) -> int:
    """Bytes that this rank's part of the values takes when it is planned, at least.

    No file is looked at. What is sent whole twice may be staged once, and single elements on top of it.
    """
    writes = [write for upload in uploads for write in upload.writes]
    dense = {(write.tensor, write.expert): write for write in writes if write.indices is None}
    apart = [one for one in dense.values() if one.expert is None or (one.tensor, None) not in dense]
    staged = [found for write in apart for found in _here(atlas, write)]
    parameters = {region.parameter for region, _ in staged}
    single = (write for write in writes if write.indices is not None)
    return sum(here * region.dst_dtype.itemsize for region, here in staged) + sum(
        _single_nbytes(atlas, write, parameters) for write in single
    )


def _single_nbytes(atlas: "Atlas", write: TensorWrite, staged: set[str]) -> int:
    """Of values and positions, unless a staged parameter takes them.

    All elements that this rank does not have may be among those that were sent.
    """
    _, length = _range(atlas, write)
    return sum(
        max(0, write.values.nbytes // region.src_dtype.itemsize - (length - here))
        * (region.dst_dtype.itemsize + _POSITION_NBYTES)
        for region, here in _here(atlas, write)
        if region.parameter not in staged
    )


def _here(atlas: "Atlas", write: TensorWrite) -> Iterator[tuple[Region, int]]:
    """Regions that have some of what the write is about, and how many elements."""
    begin, length = _range(atlas, write)
    for region in atlas.regions[write.tensor]:
        src = region.map.src
        if src.offset < begin + length and begin < src.end:
            part = region.map.within(begin, length)
            if part is not None:
                yield region, part.src.numel


def _range(atlas: "Atlas", write: TensorWrite) -> tuple[int, int]:
    """First position in the checkpoint tensor that the write is about, and how many."""
    base = atlas.checkpoint.tensors[write.tensor]
    length = base.numel // (base.shape[0] if write.expert is not None else 1)
    return (write.expert or 0) * length, length


class _Planner:
    def __init__(self, atlas: "Atlas") -> None:
        self._atlas = atlas
        self._canvases = Canvases()
        self._sites: dict[str, Site] = {}
        self._tensors: set[str] = set()
        self._elements = 0
        self._shared = SharedWrites(atlas.regions, atlas.shared)

    def add(self, staged: MappedFile, write: TensorWrite) -> None:
        base = self._atlas.checkpoint.tensors[write.tensor]
        values = staged.tensor(write.values.offset, write.values.nbytes, base.dtype)
        if write.indices is not None:
            span = write.indices
            indices = staged.tensor(span.offset, span.nbytes, span.dtype)
            _require(indices.numel() == values.numel(), f"{write.tensor}: as many indices as values")
            self._sparse(write, indices, values)
        else:
            self._dense(write, values)

    def finish(self) -> Plan:
        self._shared.require_equal()
        return Plan(self._canvases.moves(), self._sites, len(self._tensors), self._elements)

    def _sparse(self, write: TensorWrite, indices: torch.Tensor, values: torch.Tensor) -> None:
        begin, length = _range(self._atlas, write)
        regions = self._atlas.regions[write.tensor]
        if len(regions) > 1:
            # In order, the elements of a region are found without a look at all the others.
            indices, values = _in_order(indices, values, length)
        for region, first, last in _windows(regions, indices, begin):
            points: dict[tuple[str, Spot], Points] = {}
            for at in range(first, last, _PIECE):
                piece = slice(at, min(at + _PIECE, last))
                selected, elements = region.map.map(indices[piece].to(torch.int64) + begin)
                if selected.numel() == 0:
                    continue
                self._count(write.tensor, selected.numel())
                site = self._touch(region)
                chosen = bits_of(region.into(_picked(values[piece], selected)))
                self._shared.note(region, elements, chosen)
                for target, spot in site.places():
                    left, bits = self._canvases.dot(target, spot, elements, chosen)
                    if (target, spot) not in points:
                        reach = spot.reach(prod(site.shape))
                        points[target, spot] = Points(last - at, reach, bits.dtype)
                    points[target, spot].add(spot.positions(left), bits)
            for (target, _), found in points.items():
                if found:
                    self._canvases.put(scattered(target, found))

    def _dense(self, write: TensorWrite, values: torch.Tensor) -> None:
        begin, length = _range(self._atlas, write)
        _require(values.numel() == length, f"{write.tensor}: {length} values")
        for region in self._atlas.regions[write.tensor]:
            part = region.map.within(begin, length)
            if part is None:
                continue
            self._count(write.tensor, part.dst.numel)
            site = self._touch(region)
            moved = Layout(part.src.offset - begin, part.src.size, part.src.stride)
            cast = bits_of(region.into(values))
            self._shared.note(region, part.dst, moved.view(cast))
            for target, spot in site.places():
                self._place(target, spot, Correspondence(moved, part.dst), cast)

    def _place(self, target: str, spot: Spot, part: Correspondence, values: torch.Tensor) -> None:
        if spot.is_identity:
            chosen = part.src.view(values).clone(memory_format=torch.contiguous_format)
            self._canvases.put(Move(target, part.dst, chosen.reshape(-1)))
            return
        for block in _by_block(part, spot.src_block):
            self._canvases.paint(target, spot, block, values)

    def _count(self, tensor: str, elements: int) -> None:
        """What this rank takes; a rank that does not hold an expert takes nothing of it."""
        self._tensors.add(tensor)
        self._elements += elements

    def _touch(self, region: Region) -> "Site":
        site = self._atlas.sites[region.parameter]
        if site.unsupported is not None:
            raise ValueError(f"{region.tensor} cannot be updated: {site.unsupported}")
        return self._sites.setdefault(site.name, site)


def _in_order(indices: torch.Tensor, values: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rising positions below `length`, and the values at them."""
    if is_rising(indices.numpy()):
        return indices, values
    points = Points(indices.numel(), length, bits_of(values).dtype)
    points.add(indices, bits_of(values))
    indices, bits = points.sorted()
    return indices, bits.view(values.dtype)


def _windows(
    regions: tuple[Region, ...], indices: torch.Tensor, begin: int
) -> Iterator[tuple[Region, int, int]]:
    """Regions that may have some of the elements, and which span of `indices` these lie in."""
    if len(regions) == 1:
        yield regions[0], 0, indices.numel()
        return
    edges = np.array([(r.map.src.offset, r.map.src.end) for r in regions], np.int64).reshape(-1, 2) - begin
    spans = np.searchsorted(indices.numpy(), edges)
    for region, (first, last) in zip(regions, spans.tolist(), strict=True):
        if first < last:
            yield region, first, last


def _picked(values: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
    """Torch cannot index every dtype, so bits are picked."""
    return bits_of(values)[selected].view(values.dtype)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"the upload does not hold {what}")


def _by_block(part: Correspondence, length: int) -> list[Correspondence]:
    """Split along blocks of the destination (experts), so that each is staged by itself."""
    flipped = part.inverse()
    first, last = part.dst.offset // length, (part.dst.end - 1) // length
    found = (flipped.within(block * length, length) for block in range(first, last + 1))
    return [piece.inverse() for piece in found if piece is not None]
