"""Rebuilding: derived tensors and handles made anew from patched parameters, ready to go live."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from vllm._custom_ops import CPUDNNLGEMMHandler

from loaders.engine.atlas import Atlas, Site
from loaders.engine.closure import Closure
from loaders.engine.dependents import Assembly, collect_processed
from loaders.engine.handles import keep, require_same_shape, swap
from loaders.engine.job import MainThread
from loaders.engine.layout import Layout
from loaders.engine.move import Move, bits_of, same_bits
from loaders.engine.shards import Shards
from loaders.engine.workshop import Values, Workshop


class BaseChanged(Exception):
    """The checkpoint on disk is not what the engine was loaded from."""


@dataclass(frozen=True, slots=True, eq=False)
class Spare:
    """Handles that can take the place of a closure's live ones, and back; tensors to write over its own."""

    closure: Closure
    handles: dict[str, CPUDNNLGEMMHandler]
    tensors: tuple[Move, ...] = ()

    def exchange(self) -> None:
        """Exchange the live handles with these; twice is nothing.

        Raises ValueError, with nothing exchanged, if their shapes differ.
        """
        pairs = [(self.closure.state.handles[path], handle) for path, handle in self.handles.items()]
        for live, spare in pairs:
            require_same_shape(live, spare)
        for live, spare in pairs:
            swap(live, spare)

    def back(self, undo: Mapping[int, Move]) -> "Spare":
        """What undoes this one, which went live: the handles that it holds since, and what moves overwrote.

        `undo` has the undo of every move by its `id`.
        """
        return replace(self, tensors=tuple(undo[id(move)] for move in self.tensors))

    @property
    def held_nbytes(self) -> int:
        """Bytes that keeping it takes."""
        return self.nbytes + sum(move.held_nbytes for move in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes that the packed weights take, about."""
        return _packed_nbytes(self.closure, self.handles)


def _packed_nbytes(closure: Closure, handles: Mapping[str, CPUDNNLGEMMHandler]) -> int:
    """Bytes that the packed weights of a closure take, about."""
    return sum(int(handle.n * handle.k) for handle in handles.values()) * _itemsize(closure)


def _itemsize(closure: Closure) -> int:
    """Of the parameter with the most elements, which is what a handle packs."""
    parameters = [p for p in closure.twin.module._parameters.values() if p is not None]
    return max(parameters, key=torch.Tensor.numel).element_size()


class Rebuilder:
    """Makes spares from what the moves of a transaction will leave in the shards."""

    def __init__(self, atlas: Atlas, workshop: Workshop, shards: Shards) -> None:
        self._atlas = atlas
        self._workshop = workshop
        self._shards = shards

    def spares(self, moves: list[Move], touched: list[Site], main: MainThread) -> list[Spare]:
        """Spares for every closure that the touched sites feed.

        Values are patched in the calling thread; vLLM's processing runs in `main`.

        Raises BaseChanged, or ValueError if a shard cannot be had.
        """
        by_target: dict[str, list[Move]] = {}
        for move in moves:
            by_target.setdefault(move.target, []).append(move)
        return [self._spare(closure, by_target, main) for closure in self._fed_by(touched)]

    def spare_nbytes(self, touched: list[Site]) -> int:
        """Bytes that the spares of the closures that the sites feed take, about: as many as what is live."""
        closures = self._fed_by(touched)
        derived = (one.state.tensors[path] for one in closures for path in one.kind.derived)
        packed = sum(_packed_nbytes(one, one.state.handles) for one in closures)
        return packed + sum(tensor.numel() * tensor.element_size() for tensor in derived)

    def _fed_by(self, touched: list[Site]) -> list[Closure]:
        """Closures that are made anew with the touched sites, each once."""
        names = dict.fromkeys(name for site in touched for name in site.rebuilds)
        return [self._atlas.closures[name] for name in names]

    def ensure_shards(self, touched: list[Site], main: MainThread) -> None:
        """Build the shards of all closures that the sites feed, checked against the live handles.

        Also of a site that is changed where it is while others of its module are rebuilt: its shard is
        changed with it.
        """
        names = (name for site in touched for name in (site.closures if site.sharded else site.rebuilds))
        for name in dict.fromkeys(names):
            closure = self._atlas.closures[name]
            if not closure.rebuilt:
                continue
            missing = [
                site
                for site in (self._atlas.sites[local] for local in closure.sites.values())
                if site.sharded and not self._shards.has(site)
            ]
            if missing:
                self._build(closure, missing, main)

    def _build(self, closure: Closure, missing: list[Site], main: MainThread) -> None:
        made = {site.shard: self._shards.build(site) for site in missing}
        main.call(lambda: self._keep(closure, missing, made))

    def _keep(self, closure: Closure, missing: list[Site], made: Values) -> None:
        """Check and add in one go: a commit in between would leave shards of an old version."""
        if all(self._shards.has(site) for site in missing):
            return
        self._check(closure, self._values(closure, made, {}))
        for site in missing:
            self._shards.add(site, made[site.shard])

    def _check(self, closure: Closure, values: Values) -> None:
        """The shard must be what the live state was made from: a checkpoint may change on disk."""
        probe = self._workshop.probe(closure.twin.module)
        fresh = self._workshop.processed(closure.twin, values)
        made = collect_processed(fresh, closure.twin).tensors
        ours = [*self._workshop.outputs(fresh.module, probe), *(made[p] for p in closure.kind.derived)]
        theirs = [
            *self._workshop.outputs(closure.live.module, probe),
            *(closure.state.tensors[path] for path in closure.kind.derived),
        ]
        if not all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True)):
            raise BaseChanged(f"{closure.name} does not run what the checkpoint on disk holds")

    def _spare(self, closure: Closure, moves: dict[str, list[Move]], main: MainThread) -> Spare:
        values = self._values(closure, self._atlas.targets, moves)
        processed = main.call(lambda: self._workshop.processed(closure.twin, values))
        return self._ready(closure, processed)

    def _ready(self, closure: Closure, processed: Assembly) -> Spare:
        state = collect_processed(processed, closure.twin)
        for handle in state.handles.values():
            keep(handle, [tensor for tensor in state.tensors.values() if not _packed(tensor, handle)])
        moves = []
        for path in closure.kind.derived:
            made, live = state.tensors[path], closure.state.tensors[path]
            if made.shape != live.shape or made.dtype != live.dtype:
                raise ValueError(f"{closure.target(path)} came out as {made.dtype} {tuple(made.shape)}")
            place = Layout(0, tuple(live.shape), tuple(live.stride()))
            moves.append(Move(closure.target(path), place, bits_of(made.contiguous().view(-1)).cpu()))
        return Spare(closure, state.handles, tuple(moves))

    def _values(
        self, closure: Closure, targets: dict[str, torch.Tensor], moves: dict[str, list[Move]]
    ) -> Values:
        """Private copies of all parameters of the closure as the moves will leave them."""
        values: Values = {}
        for local, name in closure.sites.items():
            site = self._atlas.sites[name]
            flat = targets[site.source] if site.source in targets else self._atlas.targets[site.source]
            patched = flat.clone()
            for move in moves.get(site.source, ()):
                move.write(patched)
            values[local] = patched.view(site.shape)
        return values


def _packed(tensor: torch.Tensor, handle: CPUDNNLGEMMHandler) -> bool:
    """Whether it is as large as the weight, of which the primitive has its own packed copy."""
    n, k = int(handle.n), int(handle.k)
    return tensor.numel() >= n * k and tensor.numel() > max(n, k)
