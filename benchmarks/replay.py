"""Replay: bringing a new engine to the version that 100 commits led to, against reading those bytes once."""

import asyncio
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from app.blobs import Blobs
from app.failpoints import Failpoints as AdminFailpoints
from app.ledger import Ledger
from app.lineage import Lineage, blobs_of, compacted
from app.settings import Settings
from benchmarks.bodies import patch_entry, staged, write_batch
from benchmarks.models import Loaded, Size
from benchmarks.phases import replayed
from benchmarks.row import Row, Sense
from benchmarks.turns import in_turns, seconds, shown, spread
from loaders.catalogue import Catalogue
from loaders.engine.atlas import Atlas
from loaders.engine.failpoints import Failpoints
from loaders.engine.hands import Hands
from loaders.engine.prepared import Applied
from loaders.upload import check_batch, check_expert
from schemas.bridge import StagedUpload
from schemas.model import ModelInfo

SIZE = Size(layers=4, experts=32, hidden=1024, intermediate=1024, vocab=128)
"""Experts of 6 MiB."""
COMMITS, EXPERTS_EACH = 100, 3
PATCHED = "model.layers.{}.mlp.experts.gate_up_proj"
_ELEMENTS = 20_000
"""Of each sparse patch, of which every commit has one."""
_ROUNDS = 5
_LIMIT = """\
Of 690 MiB, BLAKE3 takes 0.15 s before they are trusted; one strided copy from the files into the
order of the kernel's tiles 0.2 s, most of it for the first touch of memory that is held until all is
ready; sparse patches that fall into experts which are replaced 0.2 s; writing 0.08 s.
"""


class History:
    """100 commits, each of some experts and a sparse patch, kept as blobs as the admin keeps them."""

    def __init__(self, folder: Path, atlas: Atlas) -> None:
        self._settings = Settings(state_dir=folder)
        self._settings.blob_dir.mkdir(parents=True)
        info = ModelInfo(
            model="",
            architecture="",
            dtype="bfloat16",
            quantization=None,
            layers=SIZE.layers,
            experts=SIZE.experts,
        )
        self._catalogue = Catalogue(atlas.catalogue, info)
        self._draw = random.Random(4)
        self.blobs = Blobs(self._settings, Ledger(), AdminFailpoints())
        self.uploads = [upload for _ in range(COMMITS) for upload in self._commit()]

    def _commit(self) -> Iterator[StagedUpload]:
        for _ in range(EXPERTS_EACH):
            yield self._expert(self._draw.randrange(SIZE.layers), self._draw.randrange(SIZE.experts))
        yield self._patch(PATCHED.format(self._draw.randrange(SIZE.layers)))

    def _expert(self, layer: int, expert: int) -> StagedUpload:
        path = self._settings.blob_dir / "new"
        slots = self._catalogue.experts(layer, expert).slots
        save_file({slot.upload.name: _drawn(*slot.place.shape) for slot in slots}, path)
        return self._kept(check_expert(staged(path), self._catalogue, layer, expert, False, False).upload)

    def _patch(self, name: str) -> StagedUpload:
        path = self._settings.blob_dir / "new"
        shape = SIZE.tensors()[name]
        numel = SIZE.experts * SIZE.hidden * 2 * SIZE.intermediate
        indices = torch.tensor(self._draw.sample(range(numel), _ELEMENTS), dtype=torch.int32)
        entry = patch_entry(name, shape, torch.bfloat16, "v", "i")
        file = write_batch(path, {"v": _drawn(_ELEMENTS), "i": indices}, [entry])
        return self._kept(check_batch(file, self._catalogue, False).upload)

    def _kept(self, upload: StagedUpload) -> StagedUpload:
        Path(upload.path).rename(self._settings.blob_dir / upload.blake3)
        return upload


def _drawn(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).uniform_(-1, 1)


class Replay:
    """What `Recovery` asks of the blobs and of an engine: check all files, prepare, commit."""

    def __init__(self, history: History, atlas: Atlas) -> None:
        self._history = history
        self._atlas = atlas
        self.steps: dict[str, float] = {}

    def run(self) -> None:
        """From the ledger's uploads to weights that are in place; notes how long each step took."""
        lineage: list[Lineage] = []
        applied: list[Applied] = []

        def read() -> None:
            found = compacted(self._history.uploads)
            lineage.append(asyncio.run(self._history.blobs.checked(found)))

        def prepare() -> None:
            applied.append(Applied(replayed(self._atlas, lineage[0]), self._atlas.targets, Hands()))

        self.steps["compacting and checking files"] = seconds(read)
        with torch.no_grad():
            self.steps["preparing"] = seconds(prepare)
            self.steps["writing"] = seconds(lambda: applied[0].apply(Failpoints(0)))


def needed(lineage: Lineage, blobs: Blobs) -> list[Path]:
    """The files of what is left after compaction."""
    return [blobs.folder / digest for digest in sorted(blobs_of(lineage))]


def read_and_copy(files: list[Path]) -> None:
    """Every byte read into memory, and copied once."""
    for path in files:
        bytearray(path.read_bytes())


def measure(names: list[str]) -> Iterator[Row]:
    """The row of this module."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Loaded(Path(folder) / "model", SIZE)
        engine.process()
        atlas = engine.atlas()
        history = History(Path(folder) / "state", atlas)
        replay, files = Replay(history, atlas), needed(compacted(history.uploads), history.blobs)
        sides = {"replay": replay.run, "read and copied": lambda: read_and_copy(files)}
        in_turns(sides, 1)
        taken = in_turns(sides, _ROUNDS)
        nbytes = sum(path.stat().st_size for path in files)
        sent = sum(upload.nbytes for upload in history.uploads)
    steps = tuple((f"last time, {step}", shown(found)) for step, found in replay.steps.items())
    yield Row(
        names[0],
        f"replay of {COMMITS} commits ({len(history.uploads)} uploads, {sent >> 20} MiB) into a new engine, "
        "from files to written weights (without the digests that prove them)",
        f"the {nbytes >> 20} MiB that they need after compaction, read and copied once",
        median(taken["replay"]) / median(taken["read and copied"]),
        Sense.AT_MOST,
        5,
        (*((label, spread(found)) for label, found in taken.items()), *steps),
        limit=" ".join(_LIMIT.split()),
    )
