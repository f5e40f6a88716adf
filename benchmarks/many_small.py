"""Many small items: does the last of thousands take longer than the first, and how many are there a second?

Each is timed where it is handled; rates are the best of some runs.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch
from safetensors.torch import save

from app.main import create_app
from app.settings import Settings
from benchmarks.bodies import patch_entry, staged, write_batch
from benchmarks.models import Loaded, Size
from benchmarks.row import Condition, Row, Sense
from benchmarks.turns import seconds, shown
from loaders.catalogue import Catalogue
from loaders.engine.atlas import Atlas
from loaders.engine.planner import plan
from loaders.staged import StagedFile
from loaders.upload import check_batch, check_expert
from schemas.bridge import (
    DigestsResult,
    EngineDescription,
    EngineState,
    ParallelLayout,
    RankDigests,
    RankState,
    StagedUpload,
)
from schemas.model import ModelInfo, Treatment

SIZE = Size(layers=36, experts=128, hidden=32, intermediate=32, vocab=128)
"""As many experts as gpt-oss-120b has, all small."""
PATCHES = 5000
_EDGE = 500
"""Items that are the start, and the end."""
_PER_SECOND = 1000
_RUNS = 3
_TARGET = 1.3


@dataclass(slots=True)
class Part:
    """One way in which many items are handled: seconds that the first and the last of them took each."""

    start: float
    end: float

    @property
    def ratio(self) -> float:
        """How much longer the last ones take."""
        return self.end / self.start

    def figure(self) -> str:
        """For people."""
        return f"{shown(self.start)} each at the start, {shown(self.end)} at the end, {self.ratio:.3g}x"


class Clocked:
    """Items that note when each is asked for, and so how long the one before took."""

    def __init__(self, items: tuple[Any, ...]) -> None:
        self._items = items
        self._at: list[float] = []

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._at.append(time.perf_counter())
            yield item
        self._at.append(time.perf_counter())

    def part(self) -> Part:
        """Of all but the first few, which warm up."""
        taken = [after - before for before, after in zip(self._at, self._at[1:], strict=False)][10:]
        return Part(median(taken[:_EDGE]), median(taken[-_EDGE:]))


def clocked(items: tuple[Any, ...], handle: Callable[[Any], object]) -> tuple[float, Part]:
    """Seconds of the quickest of some runs over all items, and what single ones took in it."""
    runs = []
    for _ in range(_RUNS):
        watched = Clocked(items)
        runs.append((seconds(partial(handle, watched)), watched.part()))
    return min(runs, key=lambda run: run[0])


@dataclass(slots=True)
class Found:
    """What was measured."""

    parts: dict[str, Part] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    """Items a second, checked and planned."""


def described(atlas: Atlas) -> EngineDescription:
    """The engine, as its bridge would say."""
    return EngineDescription(
        vllm_version="0.32.0",
        torch_version=torch.__version__,
        parallel=ParallelLayout(),
        model=ModelInfo(
            model="toy",
            architecture="GptOssForCausalLM",
            dtype="bfloat16",
            quantization=None,
            layers=SIZE.layers,
            experts=SIZE.experts,
        ),
        tensors=atlas.catalogue,
    )


def silent_engine(description: EngineDescription) -> httpx.MockTransport:
    """An engine that says what it is and that it is idle; more is not asked while bodies come in."""
    rank = RankState(rank=0, boot="b", version=0, prepared=(), undo={}, undo_nbytes=0, prepared_nbytes=0)
    answers = {
        "describe": description,
        "state": EngineState(ranks=(rank,), paused=False, weight_version="0"),
        "digests": DigestsResult(version=0, ranks=(RankDigests(rank=0, boot="b", tensors=()),)),
    }
    texts = {name: answer.model_dump_json() for name, answer in answers.items()}
    return httpx.MockTransport(
        lambda request: httpx.Response(200, text=texts.get(request.url.path.rpartition("/")[2], "{}"))
    )


def expert_body(catalogue: Catalogue, layer: int, expert: int) -> bytes:
    """An expert's tensors, as a client sends them."""
    slots = catalogue.experts(layer, expert).slots
    shapes = {slot.upload.name: slot.place.shape for slot in slots}
    return save({name: torch.rand(shape).to(torch.bfloat16) for name, shape in shapes.items()})


async def sent(description: EngineDescription, body: bytes, folder: Path) -> Part:
    """Every expert into one transaction of the admin, in one process; how long each request takes."""
    app = create_app(Settings(state_dir=folder), silent_engine(description))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8001") as http,
    ):
        while (await http.get("/health/ready")).status_code != 200:  # noqa: ASYNC110 - another service is asked
            await asyncio.sleep(0.05)
        path = (await http.post("/v1/transactions", json={})).headers["location"]
        taken = []
        for layer in range(SIZE.layers):
            for expert in range(SIZE.experts):
                begun = time.perf_counter()
                answer = await http.put(
                    f"{path}/experts/{layer}/{expert}",
                    content=body,
                    headers={"content-type": "application/octet-stream"},
                )
                answer.raise_for_status()
                taken.append(time.perf_counter() - begun)
    return Part(median(taken[50 : 50 + _EDGE]), median(taken[-_EDGE:]))


def experts(atlas: Atlas, folder: Path, found: Found) -> None:
    """4,608 uploads of an expert each: sent, checked, planned."""
    description = described(atlas)
    catalogue = Catalogue(description.tensors, description.model)
    body = expert_body(catalogue, 0, 0)
    found.parts["experts sent over HTTP into one transaction"] = asyncio.run(
        sent(description, body, folder / "state")
    )
    path = folder / "expert"
    path.write_bytes(body)
    file = staged(path)
    places = [(layer, expert) for layer in range(SIZE.layers) for expert in range(SIZE.experts)]
    checked: list[StagedUpload] = []

    def check() -> None:
        checked[:] = [
            check_expert(file, catalogue, layer, expert, partial=False, allow_nonfinite=False).upload
            for layer, expert in places
        ]

    taken = min(seconds(check) for _ in range(_RUNS))
    planned, found.parts["experts planned"] = clocked(tuple(checked), lambda items: plan(atlas, items))
    found.rates["experts"] = len(places) / (taken + planned)


def batch(atlas: Atlas, count: int, path: Path) -> StagedFile:
    """A batch of small patches, sparse and dense, of all tensors in turn; names repeat."""
    generator = torch.Generator().manual_seed(2)
    taken = [t for t in atlas.catalogue if t.treatment is not Treatment.UNSUPPORTED and t.tied_to is None]
    tensors, patches = {}, []
    for number in range(count):
        tensor = taken[number % len(taken)]
        numel = prod(tensor.shape)
        indices = torch.randperm(min(numel, 1 << 16), generator=generator)[:100].to(torch.int32)
        tensors[f"v{number}"] = torch.rand(indices.numel(), generator=generator).to(torch.bfloat16)
        tensors[f"i{number}"] = indices
        patches.append(patch_entry(tensor.name, tensor.shape, torch.bfloat16, f"v{number}", f"i{number}"))
    return write_batch(path, tensors, patches)


def batches(atlas: Atlas, folder: Path, found: Found) -> None:
    """5,000 patches in a batch: checked, planned."""
    description = described(atlas)
    catalogue = Catalogue(description.tensors, description.model)

    def checked(file: StagedFile) -> tuple[StagedUpload, float]:
        made: list[StagedUpload] = []
        taken = [
            seconds(lambda: made.append(check_batch(file, catalogue, False).upload)) for _ in range(_RUNS)
        ]
        return made[-1], min(taken)

    short, full = (batch(atlas, count, folder / f"{count}") for count in (_EDGE, PATCHES))
    _, first = checked(short)
    upload, whole = checked(full)
    found.parts["patches checked, in a batch of 500 and of 5,000"] = Part(first / _EDGE, whole / PATCHES)
    planned, found.parts["patches planned"] = clocked(
        upload.writes, lambda items: plan(atlas, (upload.model_copy(update={"writes": items}),))
    )
    found.rates["patches"] = PATCHES / (whole + planned)


def measure(names: list[str]) -> Iterator[Row]:
    """The row of this module."""
    found = Found()
    with tempfile.TemporaryDirectory() as folder:
        engine = Loaded(Path(folder) / "model", SIZE)
        engine.process()
        atlas = engine.atlas()
        batches(atlas, Path(folder), found)
        experts(atlas, Path(folder), found)
    slowest = min(found.rates.values())
    rates = tuple((f"{name} checked and planned", f"{rate:.0f}/s") for name, rate in found.rates.items())
    yield Row(
        names[0],
        "5,000 patches in a batch and 4,608 expert uploads: time per item at the end",
        "time per item at the start",
        max(part.ratio for part in found.parts.values()),
        Sense.AT_MOST,
        _TARGET,
        (*((name, part.figure()) for name, part in found.parts.items()), *rates),
        (Condition(f">= {_PER_SECOND:,} items/s", slowest >= _PER_SECOND),),
    )
