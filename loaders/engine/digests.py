"""Digests of runtime state: every tensor that kernels read, and every handle by its outputs."""

from dataclasses import dataclass, field

from blake3 import blake3

from loaders.engine.atlas import Atlas, Closure
from loaders.engine.job import MainThread
from loaders.engine.move import bytes_of
from loaders.engine.workshop import Workshop, probe_for
from schemas.bridge import TensorDigest


@dataclass(slots=True)
class Touched:
    """When each target was last written, in commits of this worker; 0 is loading."""

    clock: int = 0
    targets: dict[str, int] = field(default_factory=dict)
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
            for name in self._atlas.targets
            if name.startswith(prefix) and not name.endswith("@shard")
        ]
        for name, closure in self._atlas.closures.items():
            if closure.state.handles and name.startswith(prefix):
                digest = self._handle(closure, main)
                found.append(TensorDigest(name=f"{name}()", blake3=digest, opaque=True))
        return tuple(sorted(found, key=lambda item: item.name))

    def _tensor(self, name: str) -> str:
        written = self._touched.targets.get(name, 0)
        kept = self._tensors.get(name)
        if kept is None or kept[0] != written:
            kept = (written, blake3(bytes_of(self._atlas.targets[name])).hexdigest())
            self._tensors[name] = kept
        return kept[1]

    def _handle(self, closure: Closure, main: MainThread) -> str:
        written = self._touched.closures.get(closure.name, 0)
        kept = self._handles.get(closure.name)
        if kept is None or kept[0] != written:
            outputs = main.call(
                lambda: self._workshop.outputs(closure.live, probe_for(closure.twin, experts=0))
            )
            hasher = blake3()
            for output in outputs:
                hasher.update(bytes_of(output.contiguous()))
            kept = (written, hasher.hexdigest())
            self._handles[closure.name] = kept
        return kept[1]
