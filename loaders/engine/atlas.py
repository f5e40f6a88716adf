"""The atlas: every way from a checkpoint tensor to the memory that this rank's kernels read.

checkpoint tensor → regions (trace) → sites (twin parameters) → spots in targets
(runtime tensors, or the checkpoint-format shard of a parameter that vLLM gave up)
→ closures whose derived tensors and handles have to be made anew.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from loaders.engine.checkpoint import CHECKPOINT_DTYPE, Checkpoint
from loaders.engine.closure import Closure, closures_of
from loaders.engine.layout import Layout
from loaders.engine.provenance import Region
from loaders.engine.spot import Spot, identity
from loaders.engine.state import is_dense, span
from loaders.engine.ties import Ties, live_ties
from loaders.engine.trace import Traced, trace
from loaders.engine.twin import build_twin
from loaders.engine.workshop import Workshop
from schemas.model import CheckpointTensor, Treatment

NOT_LOADED = "the engine does not load it"
"""Reason of a tensor that has no place on a rank; another rank may hold it."""


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A twin parameter: where its elements are on this rank.

    `spots` pair a target with the map into it. `closures` names the modules that it
    belongs to (several if it is tied), `rebuilds` those of which derived state depends on it;
    `sharded` says that no target holds it as it is, so that its checkpoint-format shard
    is kept for them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spots: tuple[tuple[str, Spot], ...]
    closures: tuple[str, ...]
    rebuilds: tuple[str, ...]
    sharded: bool
    unsupported: str | None

    @property
    def shard(self) -> str:
        """Target name of the shard."""
        return f"{self.name}@shard"

    @property
    def source(self) -> str:
        """The target that holds the parameter in checkpoint format."""
        if self.sharded:
            return self.shard
        return next(target for target, spot in self.spots if spot.is_identity)

    def places(self) -> Iterator[tuple[str, Spot]]:
        """All targets that a new value has to reach, the shard included."""
        yield from self.spots
        if self.sharded:
            yield self.shard, identity(self.shard, int(torch.Size(self.shape).numel()))


@dataclass(frozen=True, slots=True)
class Atlas:
    """All that this rank knows about where weights go; fixed for the life of the engine."""

    checkpoint: Checkpoint
    regions: dict[str, tuple[Region, ...]]
    """Checkpoint tensor → its regions on this rank."""
    into: dict[str, tuple[Region, ...]]
    """Site → the regions that fill it."""
    shared: dict[str, frozenset[str]]
    """Checkpoint tensor → others that are loaded into some of the same elements."""
    sites: dict[str, Site]
    closures: dict[str, Closure]
    targets: dict[str, torch.Tensor]
    """Runtime tensors, flat over the memory that they span; shards are added by who keeps them."""
    gapped: dict[str, Layout]
    """Targets whose elements do not fill what they span → where these are."""
    ties: Ties
    catalogue: tuple[CheckpointTensor, ...]


def build_atlas(
    vllm_config: VllmConfig, live: nn.Module, checkpoint: Checkpoint, workshop: Workshop
) -> Atlas:
    """Build twin, trace and treatments for the model that this worker serves."""
    twin = build_twin(vllm_config, live)
    traced = trace(twin, checkpoint)
    closures = closures_of(vllm_config, workshop, live, twin)
    targets = {
        closure.target(path): span(tensor)
        for closure in closures.values()
        for path, tensor in closure.state.tensors.items()
    }
    gapped = {
        closure.target(path): Layout(0, tuple(tensor.shape), tuple(tensor.stride()))
        for closure in closures.values()
        for path, tensor in closure.state.tensors.items()
        if not is_dense(tensor)
    }
    sites = _sites(closures, targets)
    ties = live_ties(sites, targets)
    _refuse_partial_ties(sites, ties)
    into: dict[str, list[Region]] = defaultdict(list)
    for regions in traced.regions.values():
        for region in regions:
            into[region.parameter].append(region)
    roots = _tied_tensors(ties, into) | _shared_tensors(traced)
    catalogue = tuple(
        _describe(checkpoint, name, traced, sites, roots.get(name)) for name in checkpoint.tensors
    )
    return Atlas(
        checkpoint,
        traced.regions,
        {name: tuple(regions) for name, regions in into.items()},
        traced.shared,
        sites,
        closures,
        targets,
        gapped,
        ties,
        catalogue,
    )


def _sites(closures: dict[str, Closure], targets: dict[str, torch.Tensor]) -> dict[str, Site]:
    users: dict[str, list[tuple[Closure, str]]] = defaultdict(list)
    for closure in closures.values():
        for local, site in closure.sites.items():
            users[site].append((closure, local))
    return {name: _site(name, using, targets) for name, using in users.items()}


def _site(name: str, using: list[tuple[Closure, str]], targets: dict[str, torch.Tensor]) -> Site:
    spots: dict[int, tuple[str, Spot]] = {}
    rebuilds = []
    problems = []
    for closure, local in using:
        kind = closure.kind.parameters[local]
        problems += closure.problems(local)
        if kind.treatment is Treatment.REBUILT:
            rebuilds.append(closure.name)
        for spot in kind.spots:
            where = closure.target(spot.path)
            if where in targets:
                spots.setdefault(targets[where].data_ptr(), (where, spot))
            else:
                problems.append(f"{where} is not where it was learned to be")
    parameter = using[0][0].twin.module._parameters[using[0][1]]
    assert parameter is not None
    found = tuple(spots.values())
    sharded = any(closure.rebuilt for closure, _ in using) and not any(spot.is_identity for _, spot in found)
    return Site(
        name,
        tuple(parameter.shape),
        parameter.dtype,
        found,
        tuple(closure.name for closure, _ in using),
        tuple(rebuilds),
        sharded,
        problems[0] if problems else None,
    )


def _refuse_partial_ties(sites: dict[str, Site], ties: Ties) -> None:
    """Sites in one memory can be updated together only if each of them is all of it, as it is."""
    for name, group in ties.items():
        if any(sites[other].sharded or sites[other].shape != sites[name].shape for other in group) or not all(
            spot.is_identity for other in group for _, spot in sites[other].spots
        ):
            partners = ", ".join(other for other in group if other != name)
            reason = f"the engine put it into one memory with {partners} after loading"
            sites[name] = replace(sites[name], unsupported=sites[name].unsupported or reason)


def _tied_tensors(ties: Ties, into: Mapping[str, list[Region]]) -> dict[str, str]:
    """Checkpoint tensor → another one that lives in the same memory, which is itself left out."""
    roots: dict[str, str] = {}
    for group in set(ties.values()):
        names = sorted({region.tensor for name in group for region in into.get(name, ())})
        roots |= dict.fromkeys(names[1:], *names[:1])
    return roots


def _shared_tensors(traced: Traced) -> dict[str, str]:
    """Checkpoint tensor → the first of those that are loaded into the same elements, which is left out."""
    groups = {name: sorted({name, *others}) for name, others in traced.shared.items()}
    return {name: group[0] for name, group in groups.items() if group[0] != name}


def _describe(
    checkpoint: Checkpoint, name: str, traced: Traced, sites: dict[str, Site], tied_to: str | None
) -> CheckpointTensor:
    base = checkpoint.tensors[name]
    regions = traced.regions.get(name, ())
    used = [sites[region.parameter] for region in regions]
    problems = (site.unsupported for site in used if site.unsupported is not None)
    reason = traced.refused.get(name) or next(problems, None)
    loaded = bool(regions) or reason is not None or name in traced.constant
    if not loaded:
        reason = NOT_LOADED
    if reason is not None:
        treatment = Treatment.UNSUPPORTED
    elif any(site.rebuilds for site in used):
        treatment = Treatment.REBUILT
    else:
        treatment = Treatment.DIRECT
    return CheckpointTensor(
        name=name,
        dtype=base.dtype,
        shape=base.shape,
        treatment=treatment,
        reason=reason,
        loaded=loaded,
        tied_to=tied_to,
        **_as_run(regions),
    )


def _as_run(regions: tuple[Region, ...]) -> dict[str, Any]:
    """In which dtype the engine holds a tensor that its loader casts, and whether that loses nothing."""
    cast = [region for region in regions if region.cast]
    if not cast:
        return {}
    return {
        "runtime_dtype": CHECKPOINT_DTYPE[cast[0].dst_dtype],
        "lossless": all(region.lossless for region in cast),
    }
