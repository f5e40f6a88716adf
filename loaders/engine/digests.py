"""Digests of runtime state: every tensor that kernels read, and every handle by its outputs."""

from dataclasses import dataclass, field

from blake3 import blake3

from loaders.engine.atlas import Atlas
from loaders.engine.closure import Closure
from loaders.engine.job import MainThread
from loaders.engine.move import bytes_of, storage_of
from loaders.engine.workshop import Workshop
from schemas.bridge import TensorDigest


@dataclass(slots=True)
class Touched:
    """When weights were last written, by a clock of this worker; 0 is loading.

    Storages are known by address, since tied tensors are one storage under several names.
    """

    clock: int = 0
    storages: dict[int, int] = field(default_factory=dict)
    closures: dict[str, int] = field(default_factory=dict)


class Digests:
    """Digests by target, computed when asked for and kept until the target is written."""

    def __init__(self, atlas: Atlas, workshop: Workshop, touched: Touched) -> None:
        self._atlas = atlas
        self._workshop = workshop
        self._touched = touched
        self._tensors: dict[str, tuple[int, str]] = {}
        self._handles: dict[str, tuple[int, str]] = {}

    def compute(self, prefix: str, main: MainThread) -> tuple[TensorDigest, ...]:
        """Digests of everything whose name starts with `prefix`, in the order of names.

        May mix two versions if a commit comes in between; the caller looks at the clock.
        """
        found = [
            TensorDigest(name=name, blake3=self._tensor(name))
            for name in tuple(self._atlas.targets)  # shards may be added meanwhile
            if name.startswith(prefix) and not name.endswith("@shard")
        ]
        for name, closure in self._atlas.closures.items():
            if closure.state.handles and name.startswith(prefix):
                digest = self._handle(closure, main)
                found.append(TensorDigest(name=f"{name}()", blake3=digest, opaque=True))
        return tuple(sorted(found, key=lambda item: item.name))

    def _tensor(self, name: str) -> str:
        flat = self._atlas.targets[name]
        written = self._touched.storages.get(storage_of(flat), 0)
        kept = self._tensors.get(name)
        if kept is None or kept[0] != written:
            place = self._atlas.gapped.get(name)
            elements = flat if place is None else place.view(flat).contiguous()
            kept = (written, blake3(bytes_of(elements)).hexdigest())
            self._tensors[name] = kept
        return kept[1]

    def _handle(self, closure: Closure, main: MainThread) -> str:
        written = self._touched.closures.get(closure.name, 0)
        kept = self._handles.get(closure.name)
        if kept is None or kept[0] != written:
            outputs = main.call(
                lambda: self._workshop.outputs(closure.live.module, self._workshop.probe(closure.twin.module))
            )
            hasher = blake3()
            for output in outputs:
                hasher.update(bytes_of(output.contiguous()))
            kept = (written, hasher.hexdigest())
            self._handles[closure.name] = kept
        return kept[1]
