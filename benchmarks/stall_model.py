"""Serving while the whole demo model changes: a sparse percent of it, back again, or all of it.

What a user would pick instead is vLLM's own pause, `reload_weights` from a folder and resume, on the same
engine, in turns.
"""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.changes import checkpoint, dense_body, drawn, shaken, sparse_body
from benchmarks.engine import Service
from benchmarks.memory import mib
from benchmarks.row import Condition, Row, Sense
from benchmarks.streams import Gap, Streams
from benchmarks.turns import shown, spread
from loaders.engine.demo_model import make_demo_mixtral

PROMPT = [504, 3575, 282, 4649, 314]
"""The capital of France is"""
STREAMS = 3
_ROUNDS = 5
AGAINST = "vLLM: pause + `reload_weights` + resume"
TARGETS = {"stall_model_1": 20.0, "stall_rollback": 20.0, "stall_model_dense": 3.0}
WHAT = {
    "stall_model_1": "stall by committing 1 % of the demo Mixtral (sparse), `keep`",
    "stall_rollback": "stall by rolling that back, `keep`",
    "stall_model_dense": "stall by a dense replacement of the demo Mixtral, `keep`",
}


@dataclass(slots=True)
class Stalls:
    """Gaps and receipts by row, and vLLM's."""

    gaps: dict[str, list[Gap]] = field(default_factory=lambda: {name: [] for name in TARGETS})
    applied: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in TARGETS})
    """Seconds between pause and resume, by the receipts."""
    vllm: list[Gap] = field(default_factory=list)
    answers: dict[str, set[str]] = field(default_factory=dict)
    """What the engine says by the weights that it should have, and by who put them there."""


def changed_folder(model: Path, folder: Path, body: bytes) -> Path:
    """The checkpoint folder that vLLM reloads."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "model.safetensors").write_bytes(body)
    return folder


def measured(service: Service, streams: Streams, changed: Path, sparse: bytes, dense: bytes) -> Stalls:
    """All sides, one after the other, so many times."""
    found = Stalls()

    def note(who: str) -> None:
        found.answers.setdefault(who, set()).add(service.answer(PROMPT))

    def change(name: str, body: bytes) -> None:
        ready = service.prepared("patches", body)
        receipts = []
        found.gaps[name].append(streams.around(lambda: receipts.append(service.commit(ready))))
        found.applied[name].append(receipts[0]["timing"]["apply_ms"] / 1e3)

    note("base")
    for _ in range(_ROUNDS):
        base = service.version()
        change("stall_model_1", sparse)
        receipts = []
        gap = streams.around(lambda: receipts.append(service.rollback(base)))  # noqa: B023 - called at once
        found.gaps["stall_rollback"].append(gap)
        found.applied["stall_rollback"].append(receipts[0]["timing"]["apply_ms"] / 1e3)
        note("base")
        change("stall_model_dense", dense)
        note("changed")
        service.rollback(base)
        for folder, who in ((changed, "changed by vLLM"), (service.model, "base by vLLM")):
            found.vllm.append(streams.around(lambda: service.vllm_reload(folder)))  # noqa: B023 - called at once
            note(who)
        # vLLM's reload was seen to leave other weights than the folder's; Graft's puts back all of them.
        service.ask("POST", "/v1/reload")
    return found


def measure(names: list[str]) -> Iterator[Row]:
    """The rows of this module."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_demo_mixtral(model)
        tensors = checkpoint(model)
        new = shaken(tensors)
        sparse, dense = sparse_body(new, drawn(tensors, 0.01)), dense_body(new)
        del new, tensors
        changed = changed_folder(model, Path(folder) / "changed", dense)
        with (
            Service(model, Path(folder) / "service", max_model_len=2048) as service,
            Streams(service.inference, str(model), PROMPT, STREAMS, tokens=1900) as streams,
        ):
            before = service.digests()
            found = measured(service, streams, changed, sparse, dense)
            back = Condition("the base's digests in the end", service.digests() == before)
        sizes = {"stall_model_1": len(sparse), "stall_rollback": len(sparse), "stall_model_dense": len(dense)}
        yield from (_row(name, found, sizes[name], back) for name in TARGETS if name in names)


def _row(name: str, found: Stalls, nbytes: int, back: Condition) -> Row:
    gaps = found.gaps[name]
    vllm, ours = median(gap.stall for gap in found.vllm), median(gap.stall for gap in gaps)
    same = all(found.answers[who] == found.answers[f"{who} by vLLM"] for who in ("base", "changed"))
    figures = (
        ("vLLM", spread([gap.stall for gap in found.vllm])),
        ("Graft", spread([gap.stall for gap in gaps])),
        ("of that in the workers' hands", spread(found.applied[name])),
        ("the request as its client sees it", spread([gap.seconds for gap in gaps])),
        ("usual gap", shown(median(gap.usual for gap in gaps))),
        ("upload", mib(nbytes)),
        ("vLLM answers as the reloaded model should", "yes" if same else "no"),
    )
    sense = Sense.AT_LEAST
    limit = (
        "what is left of the stall is writing itself, in memory that answers one cache line after the other."
    )
    return Row(name, WHAT[name], AGAINST, vllm / ours, sense, TARGETS[name], figures, (back,), limit)
