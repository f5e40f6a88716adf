"""`python -m benchmarks.real_delta`: real changes of the demo Mixtral, sparse, dense, and by vLLM's reload.

A few steps of fine-tuning are taken, and each step's difference is pushed to a running engine as a sparse
batch, and again as whole tensors. What it then runs is compared by digests with a fresh engine on the last
step's checkpoint. Writes `docs/real_deltas.md`.
"""

import argparse
import re
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from benchmarks.changes import Tensors, checkpoint, dense_body, differing, sparse_body
from benchmarks.engine import Service
from benchmarks.machine import machine
from benchmarks.memory import mib
from benchmarks.report import today
from benchmarks.stall_model import PROMPT, STREAMS
from benchmarks.streams import Gap, Streams
from benchmarks.training import LEARNING_RATE, train
from benchmarks.turns import shown
from loaders.engine.demo_model import make_demo_mixtral

REPORT = Path(__file__).parents[1] / "docs" / "real_deltas.md"
_HEAD = """# Real deltas

`python -m benchmarks.real_delta` writes this: the demo Mixtral (375 M parameters, bf16) is tuned by AdamW
with a learning rate of {rate} on the CPU. The difference of each step is pushed as a sparse batch, rolled
back, and pushed as all tensors that have changed, in `keep` mode beside running streams; last, vLLM reloads
each step's checkpoint (pause, `reload_weights`, resume).

{where}, {day}.

## What changes

Clustering is how many times likelier an element has changed if the one before it has. Lines are those of 64
bytes with a changed element; in brackets, how many there would be if the elements were drawn evenly.

| step | tensors | density | clustering | lines | rows |
|---|---|---|---|---|---|"""
_PUSHES = """
## What it takes to push it

Time is from the first byte until the new weights serve; of that, uploading and preparing is beside serving.
vLLM's begins with the checkpoint written and in the page cache.

| step | way | bytes | stall | time |
|---|---|---|---|---|"""
_LINE = 32
"""Elements of bf16 in a cache line."""
_KINDS = {
    r"\.experts\.": "experts",
    r"\.gate\.": "routers",
    r"_proj\.": "attention",
    r"norm": "norms",
    r"embed": "embedding",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """Where the changed elements of a step lie."""

    changed: int
    elements: int
    neighbours: float
    """Share of changed elements after which the next one has changed too."""
    lines: float
    """Share of cache lines with a changed element."""
    rows: float
    """Share of rows with a changed element."""

    @property
    def density(self) -> float:
        """Share of the elements that changed."""
        return self.changed / self.elements

    @property
    def even_lines(self) -> float:
        """What `lines` would be if the elements were drawn evenly."""
        return float(1 - (1 - self.density) ** _LINE)

    def cells(self) -> str:
        """As part of a table."""
        return (
            f"{100 * self.density:.3g} % | {self.neighbours / max(self.density, 1e-12):.3g}x | "
            f"{100 * self.lines:.3g} % ({100 * self.even_lines:.3g} %) | {100 * self.rows:.3g} %"
        )


def spread_of(old: Tensors, new: Tensors) -> dict[str, Spread]:
    """By kind of tensor, and of `all`."""
    counts: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(7, dtype=torch.float64))
    for name, tensor in new.items():
        mask = tensor.view(torch.int16) != old[name].view(torch.int16)
        flat, rows = mask.view(-1), mask.view(-1, mask.shape[-1])
        lines = flat[: flat.numel() // _LINE * _LINE].view(-1, _LINE).any(1)
        found = torch.tensor(
            [
                *(int(flat.sum()), flat.numel(), int((flat[1:] & flat[:-1]).sum())),
                *(int(lines.sum()), lines.numel(), int(rows.any(1).sum()), rows.shape[0]),
            ],
            dtype=torch.float64,
        )
        for kind in ("all", kind_of(name)):
            counts[kind] += found
    return {kind: _spread(found) for kind, found in counts.items()}


def _spread(found: torch.Tensor) -> Spread:
    changed, elements, pairs, lines, all_lines, rows, all_rows = found.tolist()
    return Spread(
        int(changed), int(elements), pairs / max(changed, 1), lines / max(all_lines, 1), rows / all_rows
    )


def kind_of(name: str) -> str:
    """What a tensor is for."""
    return next((kind for pattern, kind in _KINDS.items() if re.search(pattern, name)), "other")


@dataclass(slots=True)
class Push:
    """One way to bring the engine to a step's weights."""

    nbytes: int
    total_s: float
    """From the first byte until the new weights serve."""
    gap: Gap


@dataclass(slots=True)
class Step:
    """One optimiser step, and how it reached the engine."""

    spread: dict[str, Spread]
    pushes: dict[str, Push] = field(default_factory=dict)
    same: bool = False
    """Whether sparse and dense left the same digests."""


def push(service: Service, streams: Streams, body: bytes) -> Push:
    """Upload, prepare and commit; streams run beside the commit."""
    begun = time.perf_counter()
    ready = service.prepared("patches", body)
    prepared_s = time.perf_counter() - begun
    gap = streams.around(lambda: service.commit(ready))
    return Push(len(body), prepared_s + gap.seconds, gap)


def push_step(service: Service, streams: Streams, old: Tensors, new: Tensors) -> Step:
    """Sparse, back, and dense."""
    positions = differing(old, new)
    step = Step(spread_of(old, new))
    base = service.version()
    step.pushes["sparse"] = push(service, streams, sparse_body(new, positions))
    digests = service.digests()
    service.rollback(base)
    step.pushes["dense"] = push(service, streams, dense_body({name: new[name] for name in positions}))
    step.same = service.digests() == digests
    return step


def reload_step(service: Service, streams: Streams, folder: Path) -> Push:
    """vLLM's own way; it reads the whole checkpoint from the page cache."""
    nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    gap = streams.around(lambda: service.vllm_reload(folder))
    return Push(nbytes, gap.seconds, gap)


def run(folder: Path, count: int) -> tuple[list[Step], bool]:
    """All steps, and whether the engine ends with the digests of a fresh one on the last checkpoint."""
    model = folder / "model"
    make_demo_mixtral(model)
    outs = list(train(model, folder, count))
    with (
        Service(model, folder / "service", max_model_len=2048) as service,
        Streams(service.inference, str(model), PROMPT, STREAMS, tokens=1900) as streams,
    ):
        old, steps = checkpoint(model), []
        for out in outs:
            new = checkpoint(out)
            if new.keys() != old.keys():
                raise RuntimeError(f"{out} has other tensors than the model")
            steps.append(push_step(service, streams, old, new))
            old = new
        digests = service.digests()
        for step, out in zip(steps, outs, strict=True):
            step.pushes["vLLM"] = reload_step(service, streams, out)
    with Service(outs[-1], folder / "fresh", max_model_len=2048) as fresh:
        return steps, fresh.digests() == digests


def report(steps: list[Step], fresh: bool) -> str:
    """As Markdown."""
    kinds = [kind for kind in steps[0].spread if kind != "all"]
    parts = [_HEAD.format(rate=f"{LEARNING_RATE:g}", where=machine(), day=today())]
    for number, step in enumerate(steps, 1):
        parts += [f"| {number} | {kind} | {step.spread[kind].cells()} |" for kind in ("all", *kinds)]
    parts.append(_PUSHES)
    for number, step in enumerate(steps, 1):
        parts += [
            f"| {number} | {way} | {mib(one.nbytes)} | {shown(one.gap.stall)} | {shown(one.total_s)} |"
            for way, one in step.pushes.items()
        ]
    stalls = {way: median(step.pushes[way].gap.stall for step in steps) for way in steps[0].pushes}
    against = [f"{way} {stalls['vLLM'] / stalls[way]:.3g} times" for way in ("sparse", "dense")]
    same = all(step.same for step in steps)
    parts += [
        f"\nvLLM's stall is longer than Graft's: {', '.join(against)} (medians).",
        f"Sparse and dense leave the same digests: {_yes(same)}.",
        f"A fresh engine on the last checkpoint has the digests of the one pushed to: {_yes(fresh)}.\n",
    ]
    return "\n".join(parts)


def _yes(holds: bool) -> str:
    return "yes" if holds else "**no**"


def main() -> int:
    """Status 0 if all digests are as they should be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_delta", description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    count = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        steps, fresh = run(Path(folder), count)
    text = report(steps, fresh)
    REPORT.write_text(text)
    print(text)
    return 0 if fresh and all(step.same for step in steps) else 1


if __name__ == "__main__":
    sys.exit(main())
