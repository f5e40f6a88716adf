"""Serving while one expert of gpt-oss's size is uploaded, prepared and committed, on a toy of two layers.

A stall is the longest gap between tokens while something lasts, less the usual gap of the same streams.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from safetensors.torch import load_file, save

from benchmarks.engine import Service
from benchmarks.memory import mib
from benchmarks.row import Condition, Row, Sense
from benchmarks.streams import Gap, Streams
from benchmarks.turns import seconds, shown, spread
from loaders.engine.toy_model import make_toy_gptoss

HIDDEN = INTERMEDIATE = 2880
"""Of gpt-oss, 20b and 120b alike: an expert has 50 MB in bf16."""
LAYER, EXPERT = 0, 3
UPLOAD = f"experts/{LAYER}/{EXPERT}"
PROMPT = [7, 3, 9, 200, 41] * 4
STREAMS = 2
_ROUNDS, _CALLS = 7, 20
_SHARE_ROUNDS, _SHARE_S = 4, 5.0


def expert_body(model: Path) -> bytes:
    """Other weights for one expert, as a client sends them."""
    prefix = f"model.layers.{LAYER}.mlp.experts."
    tensors = load_file(model / "model.safetensors")
    names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    return save({name: (tensors[prefix + name][EXPERT].float() * 1.1).bfloat16() for name in names})


@dataclass(slots=True)
class Stalls:
    """Gaps by what happened, in turns."""

    nothing: list[Gap] = field(default_factory=list)
    bare: list[Gap] = field(default_factory=list)
    """One RPC that copies as many bytes once, without a pause."""
    prepare: list[Gap] = field(default_factory=list)
    keep: list[Gap] = field(default_factory=list)
    recompute: list[Gap] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    """RPCs by vLLM's route, in seconds."""
    routes: list[float] = field(default_factory=list)
    """The same route without an RPC behind it."""

    @property
    def limit(self) -> float:
        """One copy and one RPC, in seconds."""
        return median(self.copies) + median(self.calls) - median(self.routes)


def stall(gaps: list[Gap]) -> float:
    """The median of the stalls, in seconds."""
    return median(gap.stall for gap in gaps)


def measured(service: Service, streams: Streams, body: bytes) -> Stalls:
    """All sides, one after the other, so many times; each commit is rolled back."""
    found = Stalls()
    for _ in range(_ROUNDS):
        found.nothing.append(streams.around(lambda: time.sleep(0.3)))
        found.bare.append(
            streams.around(lambda: found.copies.append(float(service.rpc("bare_copy", str(len(body)))[0])))
        )
        for _ in range(_CALLS):
            found.calls.append(seconds(lambda: service.rpc("bare_nothing")))
            found.routes.append(seconds(service.nothing))
        for mode, gaps in (("keep", found.keep), ("recompute", found.recompute)):
            before, ready = service.version(), []
            found.prepare.append(streams.around(lambda: ready.append(service.prepared(UPLOAD, body, mode))))  # noqa: B023 - called at once
            gaps.append(streams.around(lambda: service.commit(ready[0])))  # noqa: B023 - called at once
            service.rollback(before)
    return found


def measure(names: list[str]) -> Iterator[Row]:
    """The rows of this module."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_toy_gptoss(model, hidden=HIDDEN, intermediate=INTERMEDIATE)
        body = expert_body(model)
        with (
            Service(model, Path(folder) / "service") as service,
            Streams(service.inference, str(model), PROMPT, STREAMS) as streams,
        ):
            if {"stall_expert", "recompute"} & set(names):
                before = service.digests()
                found = measured(service, streams, body)
                back = Condition("rolled back bit for bit", service.digests() == before)
                yield from (
                    row for row in (_expert(found, len(body), back), _recompute(found)) if row.name in names
                )
            if "serving_share" in names:
                yield _share(service, streams, body)


def _expert(found: Stalls, nbytes: int, back: Condition) -> Row:
    figures = (
        ("stall", spread([gap.stall for gap in found.keep])),
        ("usual gap", shown(median(gap.usual for gap in found.keep))),
        ("one copy in the worker", spread(found.copies)),
        ("one RPC", shown(median(found.calls) - median(found.routes))),
        (
            "stall by a bare RPC that copies once, without a transaction",
            spread([g.stall for g in found.bare]),
        ),
        ("stall while nothing happens", spread([gap.stall for gap in found.nothing])),
        ("stall while the expert is uploaded and prepared", spread([gap.stall for gap in found.prepare])),
        ("the commit as its client sees it", spread([gap.seconds for gap in found.keep])),
    )
    return Row(
        "stall_expert",
        f"stall by committing one gpt-oss-size expert ({mib(nbytes)}, repacked), `keep`",
        "one copy of the bytes + one RPC",
        stall(found.keep) / found.limit,
        Sense.AT_MOST,
        3,
        figures,
        (back,),
        "the machine's own jitter counts in full: see what a stall is while nothing happens.",
    )


def _recompute(found: Stalls) -> Row:
    keep, recompute = stall(found.keep), stall(found.recompute)
    figures = (
        ("stall with `recompute`", spread([gap.stall for gap in found.recompute])),
        ("with `keep`", spread([gap.stall for gap in found.keep])),
        ("tokens in the cache", f"{STREAMS} streams of about {len(PROMPT) + 25}"),
    )
    return Row(
        "recompute",
        "part of a stall that is KV recompute, `recompute`, one expert",
        "the whole stall",
        max(0.0, recompute - keep) / recompute,
        Sense.AT_LEAST,
        None,
        figures,
    )


def _share(service: Service, streams: Streams, body: bytes) -> Row:
    spans: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    sent: list[float] = []

    def turns() -> None:
        for _ in range(_SHARE_ROUNDS):
            for side, taken in spans.items():
                begun = time.perf_counter()
                if side == "with":
                    _upload_every_second(service, body, begun + _SHARE_S, sent)
                else:
                    time.sleep(_SHARE_S)
                taken.append((begun, time.perf_counter()))

    _, _, course = streams.during(turns)
    without, beside = (median(course.rate(*span) for span in spans[side]) for side in ("without", "with"))
    lasted = sum(ended - begun for begun, ended in spans["with"])
    pace = len(sent) / lasted
    return Row(
        "serving_share",
        f"tokens/s of {STREAMS} streams while one {mib(len(body))} expert a second is uploaded and prepared",
        "the same streams without",
        beside / without,
        Sense.AT_LEAST,
        0.8,
        (
            ("with", f"{beside:.3g} tokens/s"),
            ("without", f"{without:.3g} tokens/s"),
            ("from the first byte to prepared", spread(sent)),
        ),
        (Condition(f"one a second (here {pace:.2g})", pace > 0.9),),
        "receiving, hashing, checking and repacking an expert take cores that the streams' servers need.",
    )


def _upload_every_second(service: Service, body: bytes, until: float, sent: list[float]) -> None:
    while (begun := time.perf_counter()) < until:
        ready: list[str] = []
        sent.append(seconds(lambda: ready.append(service.prepared(UPLOAD, body))))  # noqa: B023 - called at once
        service.ask("DELETE", ready[0])
        with contextlib.suppress(ValueError):  # late already
            time.sleep(begun + 1 - time.perf_counter())
