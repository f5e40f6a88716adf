"""Provenance: what is known of the tensors that pass through a loader, and the regions that this makes."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch

from loaders.engine.layout import Correspondence, Layout, compose, disjoint, require_nested

_MOST_SHARED = 4096
"""Elements that may be loaded from two tensors: scales and shapes, which are compared one by one."""


@dataclass(frozen=True, slots=True)
class Region:
    """Elements of one checkpoint tensor and where they go in one twin parameter.

    `map.src` is in flat row-major positions of the checkpoint tensor, `map.dst` in
    positions of the parameter's storage, both in elements.
    """

    tensor: str
    parameter: str
    map: Correspondence
    src_dtype: torch.dtype
    dst_dtype: torch.dtype
    through: tuple[torch.dtype, ...] = ()
    """Dtypes that the loader casts to in between, in order."""

    @property
    def cast(self) -> bool:
        """Whether the engine holds the elements in another dtype than the checkpoint."""
        return self.src_dtype != self.dst_dtype or bool(self.through)

    @property
    def lossless(self) -> bool:
        """Whether what the checkpoint holds can be told from what the engine holds."""
        return all(_holds(dtype, self.src_dtype) for dtype in (*self.through, self.dst_dtype))

    @property
    def refusal(self) -> str | None:
        """Why new elements cannot be cast as vLLM's loader did, if they cannot."""
        steps = (self.src_dtype, *self.through, self.dst_dtype)
        later = steps[1:]
        if not self.cast or all(dtype.is_floating_point for dtype in later):
            return None
        return f"stored as {self.src_dtype}, runs as {self.dst_dtype}"

    def into(self, values: torch.Tensor) -> torch.Tensor:
        """Checkpoint values in the dtype of the parameter, as the loader's own casts make them."""
        for dtype in (*self.through, self.dst_dtype):
            values = values.to(dtype)
        return values

    def back(self, values: torch.Tensor) -> torch.Tensor:
        """What the parameter holds in the dtype of the checkpoint."""
        return values.to(self.src_dtype)


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of `narrow` is one of `wide`."""
    if wide == narrow:
        return True
    if not (wide.is_floating_point and narrow.is_floating_point):
        return False
    a, b = torch.finfo(wide), torch.finfo(narrow)
    return a.eps <= b.eps and a.max >= b.max and a.smallest_normal * a.eps <= b.smallest_normal * b.eps


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a tensor holds that is not one of the twin's parameters."""

    tensors: frozenset[str]
    map: Correspondence | None = None
    """Own layout (dst) ← flat positions of the one checkpoint tensor (src); none if there is a problem."""
    dtypes: tuple[torch.dtype, ...] = ()
    """What the elements were cast to on their way, the checkpoint's dtype first."""
    problem: str = "mixed while loading"
    constant: bool = False
    """A loader filled it with a constant, so what it held does not matter on this rank."""


@dataclass(slots=True)
class Recorder:
    parameters: dict[int, tuple[str, torch.Tensor]]
    sources: dict[int, Provenance] = field(default_factory=dict)
    regions: dict[str, list[Region]] = field(default_factory=lambda: defaultdict(list))
    """Parameter → what was copied into it, in the order of loading."""
    refused: dict[str, str] = field(default_factory=dict)
    constant: set[str] = field(default_factory=set)
    """Checkpoint tensors in whose place a constant was loaded."""
    keep: list[torch.Tensor] = field(default_factory=list)
    """Keeps storages alive: their addresses are the keys above."""

    def refuse(self, tensors: Iterable[str], reason: str) -> None:
        for name in tensors:
            self.refused.setdefault(name, reason)

    def provenance(self, tensor: torch.Tensor) -> Provenance | None:
        """Where the elements of `tensor` come from, if from the checkpoint."""
        key = key_of(tensor)
        found = self.sources.get(key)
        if found is None and key in self.parameters:
            name = self.parameters[key][0]
            owners = frozenset(region.tensor for region in self.regions[name])
            return Provenance(owners, problem=f"read back from {name} while loading") if owners else None
        if found is not None and found.map is not None and tensor.dtype != found.dtypes[-1]:
            return Provenance(found.tensors, problem=f"reinterpreted as {tensor.dtype} while loading")
        return found

    def overwritten(self, parameter: str, target: torch.Tensor) -> None:
        """Something that is no region was written over `target`."""
        place = Layout.of(target)
        for region in self.regions[parameter]:
            if not disjoint(region.map.dst, place):
                self.refuse([region.tensor], f"written over in {parameter} while loading")

    def shared(self) -> dict[str, frozenset[str]]:
        """Checkpoint tensor → others that are loaded into some of the same elements.

        Refused are a tensor that meets itself, of which no single element could be changed, large
        ones, and one of which a partner is refused: they could not be kept equal.
        """
        pairs: dict[str, set[str]] = defaultdict(set)
        reasons: dict[str, str] = {}
        for first, second in self._overlaps():
            names = {first.tensor, second.tensor}
            reason = f"{first.tensor} and {second.tensor} share elements of {first.parameter}"
            for tensor in names:
                pairs[tensor] |= names - {tensor}
                reasons.setdefault(tensor, reason)
            if len(names) == 1 or min(first.map.dst.numel, second.map.dst.numel) > _MOST_SHARED:
                self.refuse(names, reason)
        while spread := [t for t in pairs if t not in self.refused and not pairs[t].isdisjoint(self.refused)]:
            for tensor in spread:
                self.refuse([tensor], reasons[tensor])
        return {tensor: frozenset(others) for tensor, others in pairs.items() if tensor not in self.refused}

    def _overlaps(self) -> Iterator[tuple[Region, Region]]:
        """Every pair of regions that share elements of a parameter."""
        for regions in self.regions.values():
            ordered = sorted(dict.fromkeys(regions), key=lambda region: region.map.dst.offset)
            for index, first in enumerate(ordered):
                for second in islice(ordered, index + 1, None):
                    if second.map.dst.offset >= first.map.dst.end:
                        break
                    if not disjoint(first.map.dst, second.map.dst):
                        yield first, second


def key_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def region_of(
    name: str, parameter: torch.Tensor, target: torch.Tensor, source: torch.Tensor, provenance: Provenance
) -> Region:
    """The region of one copy.

    Raises ValueError if it is none.
    """
    if provenance.map is None:
        raise ValueError(provenance.problem)
    own, place = Layout.of(parameter), Layout.of(target)
    if own.offset or not own.is_contiguous or place.end > own.end or target.dtype != parameter.dtype:
        raise ValueError(f"{name} is not stored in the order of its elements")
    if source.numel() != target.numel():
        raise ValueError("broadcast while loading")
    origin = compose(Layout.of(source.expand_as(target)), provenance.map)
    map_ = Correspondence(origin, place)
    require_nested(map_.simplified().src)
    require_nested(map_.inverse().simplified().src)
    (tensor,) = provenance.tensors
    first, *through = provenance.dtypes
    if through and through[-1] == target.dtype:
        through.pop()
    region = Region(tensor, name, map_, first, target.dtype, tuple(through))
    if region.refusal is not None:
        raise ValueError(region.refusal)
    return region
