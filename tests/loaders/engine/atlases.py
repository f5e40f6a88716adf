"""Small atlases by hand: regions, sites and targets on the CPU, without vLLM."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from loaders.engine.checkpoint import BaseTensor
from loaders.engine.layout import Correspondence, Layout
from loaders.engine.provenance import Region
from loaders.engine.spot import Spot, identity
from schemas.bridge import IndexSpan, Span, StagedUpload, TensorWrite
from schemas.dtypes import Dtype


@dataclass
class Place:
    """As `Site` of the atlas, which needs vLLM to be imported."""

    name: str
    shape: tuple[int, ...]
    spots: tuple[tuple[str, Spot], ...]
    sharded: bool = False
    unsupported: str | None = None
    closures: tuple[str, ...] = ()
    rebuilds: tuple[str, ...] = ()

    @property
    def shard(self) -> str:
        return f"{self.name}@shard"

    def places(self) -> Iterable[tuple[str, Spot]]:
        yield from self.spots
        if self.sharded:
            yield self.shard, identity(self.shard, int(torch.Size(self.shape).numel()))


@dataclass
class Hand:
    """An atlas under construction."""

    tensors: dict[str, BaseTensor] = field(default_factory=dict)
    regions: dict[str, tuple[Region, ...]] = field(default_factory=dict)
    sites: dict[str, Place] = field(default_factory=dict)
    targets: dict[str, torch.Tensor] = field(default_factory=dict)

    def add_tensor(self, name: str, shape: tuple[int, ...], dtype: Dtype) -> None:
        self.tensors[name] = BaseTensor(name, dtype, shape, Path("unread"), 0)
        self.regions[name] = ()

    def add_region(
        self, tensor: str, site: str, source: torch.Tensor, target: torch.Tensor, dtype: torch.dtype
    ) -> None:
        """`source` and `target` are views of stand-ins of the tensor and the parameter."""
        map_ = Correspondence(Layout.of(source), Layout.of(target))
        self.regions[tensor] += (Region(tensor, site, map_, dtype, dtype),)

    @property
    def atlas(self) -> Any:
        checkpoint = SimpleNamespace(tensors=self.tensors)
        return SimpleNamespace(
            checkpoint=checkpoint,
            regions=self.regions,
            sites=self.sites,
            targets=self.targets,
            gapped={},
            ties={},
            shared={},
            closures={},
        )


class Body:
    """A staged file written piece by piece."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = bytearray(b"headers!")
        self.writes: list[TensorWrite] = []

    def span(self, tensor: torch.Tensor) -> Span:
        raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        offset = len(self.data)
        self.data += raw
        return Span(offset=offset, nbytes=len(raw))

    def write(
        self,
        tensor: str,
        values: torch.Tensor,
        indices: torch.Tensor | None = None,
        expert: int | None = None,
    ) -> None:
        where = None
        if indices is not None:
            span = self.span(indices)
            dtype = Dtype.I32 if indices.dtype == torch.int32 else Dtype.I64
            where = IndexSpan(offset=span.offset, nbytes=span.nbytes, dtype=dtype)
        self.writes.append(TensorWrite(tensor=tensor, expert=expert, values=self.span(values), indices=where))

    def staged(self) -> StagedUpload:
        self.path.write_bytes(self.data)
        return StagedUpload(
            path=str(self.path), nbytes=len(self.data), blake3="0" * 64, writes=tuple(self.writes)
        )


def simple(
    shape: tuple[int, ...] = (4, 3), dtype: Dtype = Dtype.F32, torch_dtype: torch.dtype = torch.float32
) -> Hand:
    """One tensor that is one target."""
    hand = Hand()
    hand.add_tensor("w", shape, dtype)
    stand_in = torch.empty(shape, dtype=torch_dtype)
    hand.add_region("w", "p", stand_in, stand_in, torch_dtype)
    hand.sites["p"] = Place("p", shape, (("p", identity("p", stand_in.numel())),))
    hand.targets["p"] = torch.zeros(stand_in.numel(), dtype=torch_dtype)
    return hand
