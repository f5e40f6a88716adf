"""The whole service as a client should see it: weights per version, transactions, baselines, keys."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from schemas.dtypes import Dtype
from tests.fakes.admin import bf16, expert_parts
from tests.fakes.engine import HIDDEN, Array, base_weights, tensors
from tests.fakes.safetensors import Part, body

Weights = dict[str, Array]
"""Raw bits of every tensor, flat."""
SHAPES = {tensor.name: tensor.shape for tensor in tensors()}
NORM = "model.norm.weight"
STACK = "model.layers.{}.mlp.experts.{}"


@dataclass(frozen=True)
class Write:
    """New bits at flat positions of a tensor."""

    tensor: str
    where: Array
    bits: Array


@dataclass(frozen=True)
class Body:
    """An upload: where it goes below a transaction or below /v1, its bytes, and what it should do."""

    path: str
    content: bytes
    writes: tuple[Write, ...]

    @property
    def method(self) -> str:
        """Experts are put, patches are posted."""
        return "PUT" if self.path.startswith("experts") else "POST"


def expert(layer: int, number: int, seed: int) -> Body:
    """A whole expert."""
    parts = expert_parts(seed)
    writes = []
    for short, (_, _, data) in parts.items():
        name, bits = STACK.format(layer, short), np.frombuffer(data, np.uint16)
        writes.append(Write(name, np.arange(len(bits)) + number * len(bits), bits))
    return Body(f"experts/{layer}/{number}", body(parts), tuple(writes))


def plain(layer: int, seed: int) -> Body:
    """A plain file with one attention tensor."""
    name = f"model.layers.{layer}.self_attn.q_proj.weight"
    data = bf16(seed, HIDDEN * HIDDEN)
    bits = np.frombuffer(data, np.uint16)
    content = body({name: (Dtype.BF16, (HIDDEN, HIDDEN), data)})
    return Body("patches", content, (Write(name, np.arange(len(bits)), bits),))


def batch(layer: int, seed: int) -> Body:
    """A sparse patch of an expert stack, then a dense one of the norm, then a sparse one of the norm."""
    rng = np.random.default_rng(seed)
    stack = STACK.format(layer, "gate_up_proj")
    size = int(np.prod(SHAPES[stack]))
    chosen = [(stack, rng.permutation(size)[:7]), (NORM, None), (NORM, rng.permutation(HIDDEN)[:2])]
    listed: list[dict[str, object]] = []
    parts: dict[str, Part] = {}
    writes = []
    for place, (name, where) in enumerate(chosen):
        positions = np.arange(HIDDEN) if where is None else where
        data = bf16(seed + place, len(positions))
        parts[f"v{place}"] = (Dtype.BF16, (len(positions),), data)
        listed.append({"name": name, "shape": SHAPES[name], "dtype": "BF16", "values": f"v{place}"})
        if where is not None:
            parts[f"i{place}"] = (Dtype.I64, (len(where),), where.astype(np.int64).tobytes())
            listed[-1]["indices"] = f"i{place}"
        writes.append(Write(name, positions, np.frombuffer(data, np.uint16)))
    return Body("patches", body(parts, {"patches": json.dumps(listed)}), tuple(writes))


@dataclass
class Txn:
    """One transaction."""

    path: str
    base: int | None
    state: str = "open"
    uploads: list[Body] = field(default_factory=list)
    on_engine: bool = False
    """Whether the engine has something prepared for it."""

    @property
    def live(self) -> bool:
        """Whether it can still be built on."""
        return self.state in ("open", "prepared")

    def take(self, upload: Body) -> None:
        """Accept an upload; an expert's replaces an earlier one of the same, and goes last."""
        if upload.method == "PUT":
            self.uploads = [one for one in self.uploads if one.path != upload.path]
        self.uploads.append(upload)
        self.end("open")

    def end(self, state: str) -> None:
        """Go to a state in which the engine holds nothing for it."""
        self.state, self.on_engine = state, False

    @property
    def refusal(self) -> str | None:
        """With what everything but looking is refused, if so."""
        ends = {"expired": "transaction_expired", "interrupted": "interrupted"}
        return None if self.live else ends.get(self.state, "transaction_state")


@dataclass(frozen=True)
class Sent:
    """A request under a key, and its first answer."""

    method: str
    path: str
    headers: Mapping[str, str]
    options: Mapping[str, Any]
    answer: httpx.Response


class Model:
    """What should be true."""

    def __init__(self) -> None:
        self.versions: list[Weights] = [base_weights()]
        self.roots = [0]
        """Per version: the first one of which it has the weights, as the history tells it."""
        self.transactions: list[Txn] = []
        self.baselines: dict[str, int] = {}
        self.sent: list[Sent] = []

    @property
    def current(self) -> int:
        """The current version."""
        return len(self.versions) - 1

    def commit(self, uploads: Sequence[Body]) -> None:
        """One more version with these uploads over the last."""
        weights = {name: bits.copy() for name, bits in self.versions[-1].items()}
        for upload in uploads:
            for write in upload.writes:
                weights[write.tensor][write.where] = write.bits
        self.reload(weights)

    def reload(self, weights: Weights) -> None:
        """One more version with all weights anew."""
        self.versions.append(weights)
        self.roots.append(self.current)

    def roll_back(self, target: int) -> None:
        """One more version with old weights."""
        self.versions.append(self.versions[target])
        self.roots.append(self.roots[target])
