"""Sparse patches of one expert tensor: Graft's commit against vLLM's `load_checkpoint_weight_patches`.

Both get the same positions and values, unsorted. vLLM does all its work while serving stands still; of
Graft that is what depends on the weights: taking the undo (a session does that while the engine serves)
and writing. What it does before is a figure of the row.
"""

import gc
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from statistics import median

import numpy as np
import torch
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from benchmarks.bodies import patch_entry, write_batch
from benchmarks.memory import Peak, mib
from benchmarks.models import Loaded, Size
from benchmarks.phases import prepared, with_undo
from benchmarks.row import Row, Sense
from benchmarks.turns import seconds, spread
from loaders.catalogue import Catalogue
from loaders.engine.atlas import Atlas, Site
from loaders.engine.checkpoint import Checkpoint
from loaders.engine.failpoints import Failpoints
from loaders.engine.hands import Hands
from loaders.engine.move import same_bits
from loaders.engine.prepared import Applied, Prepared
from loaders.engine.spot import identity
from loaders.engine.state import span
from loaders.engine.trace import trace
from loaders.engine.twin import build_twin
from loaders.upload import check_batch
from schemas.bridge import StagedUpload
from schemas.dtypes import Dtype
from schemas.model import CheckpointTensor, ModelInfo, Treatment

SIZE = Size(layers=1, experts=32, hidden=2880, intermediate=2880, vocab=128)
"""One layer of gpt-oss-20b."""
TENSOR = "model.layers.0.mlp.experts.gate_up_proj"
DENSITIES = {
    "sparse_001": (1e-4, 300),
    "sparse_01": (1e-3, 100),
    "sparse_1": (1e-2, 20),
    "sparse_30": (0.3, 1),
}
"""Row → share of the elements, and how many times faster it has to be."""
_ROUNDS = 2
WHAT = "applying a sparse patch of {:g} % to a [32, 2880, 5760] bf16 expert tensor, undo included"
AGAINST = "vLLM's `load_checkpoint_weight_patches`"


@dataclass(frozen=True, slots=True)
class Patch:
    """Positions, unsorted and without repeats, and what to write there; on disk as a client sends it."""

    indices: torch.Tensor
    values: torch.Tensor
    path: Path

    def for_vllm(self) -> CheckpointWeightPatch:
        """As vLLM's weight transfer makes it of what it receives."""
        shape = SIZE.tensors()[TENSOR]
        return CheckpointWeightPatch(TENSOR, shape, torch.bfloat16, self.values, self.indices)

    def checked(self) -> StagedUpload:
        """Written as a body, and checked as the admin does."""
        shape = SIZE.tensors()[TENSOR]
        entry = patch_entry(TENSOR, shape, torch.bfloat16, "v", "i")
        file = write_batch(self.path, {"v": self.values, "i": self.indices}, [entry])
        tensor = CheckpointTensor(name=TENSOR, dtype=Dtype.BF16, shape=shape, treatment=Treatment.DIRECT)
        info = ModelInfo(
            model="", architecture="", dtype="bfloat16", quantization=None, layers=1, experts=SIZE.experts
        )
        return check_batch(file, Catalogue((tensor,), info), allow_nonfinite=False).upload


def drawn(share: float, path: Path) -> Patch:
    """A patch of that share of the tensor's elements, each about equally likely."""
    rng = np.random.default_rng(3)
    numel = prod(SIZE.tensors()[TENSOR])
    count = int(share * numel)
    edges = np.linspace(0, numel, count + 1).astype(np.int64)
    indices = (edges[:-1] + (rng.random(count) * np.diff(edges)).astype(np.int64)).astype(np.int32)
    rng.shuffle(indices)
    values = torch.empty(count, dtype=torch.bfloat16).uniform_(-1, 1)
    return Patch(torch.from_numpy(indices), values, path)


def plain(engine: Loaded) -> Atlas:
    """The way into a tensor that kernels read as it was loaded."""
    checkpoint = Checkpoint.open(engine.folder)
    traced = trace(build_twin(engine.config, engine.model), checkpoint)
    (parameter,) = {region.parameter for region in traced.regions[TENSOR]}
    live = engine.model.get_parameter(parameter)
    spots = ((parameter, identity(parameter, live.numel())),)
    site = Site(parameter, tuple(live.shape), live.dtype, spots, (), (), False, None)
    targets = {parameter: span(live.detach())}
    return Atlas(checkpoint, traced.regions, {}, {}, {parameter: site}, {}, targets, {}, {}, ())


@dataclass(slots=True)
class Taken:
    """Seconds of either side, and bytes."""

    count: int
    vllm: list[float] = field(default_factory=list)
    apply: list[float] = field(default_factory=list)
    prepare: list[float] = field(default_factory=list)
    peak: int = 0
    """Memory that preparing and applying took on top, in bytes."""

    @property
    def needed(self) -> int:
        """Bytes of indices, values and undo."""
        return self.count * (4 + 2 + 2)

    @property
    def memory(self) -> float:
        """How many times that it took."""
        return self.peak / self.needed


def undone_by(atlas: Atlas, ready: Prepared) -> Applied:
    """Apply, with the undo taken just before: a session takes it while it prepares, vLLM not at all."""
    applied = Applied(with_undo(atlas, ready), atlas.targets, Hands())
    applied.apply(Failpoints(0))
    return applied


def ours(atlas: Atlas, upload: StagedUpload, taken: Taken) -> Applied:
    """Prepare and apply, and note what both took."""
    gc.collect()
    with Peak() as peak, torch.no_grad():
        ready: list[Prepared] = []
        taken.prepare.append(seconds(lambda: ready.append(prepared(atlas, (upload,)))))
        applied: list[Applied] = []
        taken.apply.append(seconds(lambda: applied.append(undone_by(atlas, ready[0]))))
    taken.peak = max(taken.peak, peak.nbytes)
    return applied[0]


def compared(engine: Loaded, atlas: Atlas, patch: Patch) -> Taken:
    """Both sides in turns: vLLM's once, Graft's before and after; the first, which warms up, is left out."""
    upload, taken = patch.checked(), Taken(patch.values.numel())
    ours(atlas, upload, Taken(taken.count)).revert()
    for _ in range(_ROUNDS):
        for _ in range(2):
            ours(atlas, upload, taken).revert()
        taken.vllm.append(seconds(partial(load_checkpoint_weight_patches, engine.model, [patch.for_vllm()])))
        ours(atlas, upload, taken).revert()
    return taken


def same_bits_as_vllm(engine: Loaded, atlas: Atlas, patch: Patch) -> bool:
    """Whether both sides leave the same tensor, where vLLM's way is right: as it was loaded."""
    (target,) = atlas.targets.values()
    applied = ours(atlas, patch.checked(), Taken(1))
    changed = target.clone()
    applied.revert()
    load_checkpoint_weight_patches(engine.model, [patch.for_vllm()])
    return same_bits(changed, target)


def measure(names: list[str]) -> Iterator[Row]:
    """The rows of this module."""
    peaks: dict[str, Taken] = {}
    with tempfile.TemporaryDirectory() as folder:
        engine = Loaded(Path(folder) / "model", SIZE)
        yield from _plain(engine, Path(folder), names, peaks)
        if {"sparse_packed_1", "sparse_memory"} & set(names):
            engine.process()
            atlas, patch = engine.atlas(), drawn(0.01, Path(folder) / "patch")
            if "sparse_packed_1" in names:
                peaks["packed, 1 %"] = taken = compared(engine, atlas, patch)
                yield _row(
                    "sparse_packed_1",
                    f"{WHAT.format(1)}, where vLLM repacks it (and its own patches go astray)",
                    15,
                    taken,
                )
            else:
                peaks["packed, 1 %"] = taken = Taken(patch.values.numel())
                ours(atlas, patch.checked(), taken).revert()
    if "sparse_memory" in names:
        yield _memory(peaks)


def _plain(engine: Loaded, folder: Path, names: list[str], peaks: dict[str, Taken]) -> Iterator[Row]:
    atlas = plain(engine)
    if not same_bits_as_vllm(engine, atlas, drawn(0.001, folder / "patch")):
        raise RuntimeError("Graft and vLLM do not leave the same tensor")
    for name, (share, target) in DENSITIES.items():
        measured_anyway = "sparse_memory" in names and share >= 0.01
        if name not in names and not measured_anyway:
            continue
        patch = drawn(share, folder / "patch")
        if name in names:
            taken = compared(engine, atlas, patch)
            yield _row(name, WHAT.format(100 * share), target, taken)
        else:
            taken = Taken(patch.values.numel())
            ours(atlas, patch.checked(), taken).revert()
        if share >= 0.01:  # of less, buffers of fixed size are most
            peaks[f"{100 * share:g} %"] = taken


def _row(name: str, what: str, target: float, taken: Taken) -> Row:
    vllm, apply, prepare = median(taken.vllm), median(taken.apply), median(taken.prepare)
    figures = (
        ("vLLM", spread(taken.vllm)),
        ("Graft's commit (undo and writing)", spread(taken.apply)),
        ("prepared before, while the engine serves", spread(taken.prepare)),
        ("ratio if preparing counted too", f"{vllm / (apply + prepare):.3g}"),
    )
    return Row(name, what, AGAINST, vllm / apply, Sense.AT_LEAST, target, figures)


def _memory(peaks: dict[str, Taken]) -> Row:
    figures = tuple(
        (name, f"{mib(taken.peak)} for {mib(taken.needed)}, {taken.memory:.3g}x")
        for name, taken in peaks.items()
    )
    return Row(
        "sparse_memory",
        "highest resident memory while preparing and applying, over that before",
        "bytes of indices, values and undo",
        max(taken.memory for taken in peaks.values()),
        Sense.AT_MOST,
        3,
        figures,
    )
