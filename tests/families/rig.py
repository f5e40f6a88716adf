"""Identity, change and rollback of one model in engines of its own process; prints JSON. Run by the tests.

Every change is also made to the checkpoint in memory; the oracle is a fresh engine on
the folder that this gives.
"""

import gc
import json
import os
import re
import sys
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
}

import torch
from blake3 import blake3
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest

from schemas.bridge import (
    CommitRequest,
    DigestsRequest,
    IndexSpan,
    PrepareRequest,
    Span,
    StagedUpload,
    TensorWrite,
)
from schemas.dtypes import Dtype
from tests.families.models import change, tensors_of

PROMPTS = ([10, 20, 30, 40, 50], [7, 3, 9, 200, 41] * 30)
"""The second is longer than a KV block of 128."""
TOKENS = 12


@dataclass(frozen=True)
class Row:
    """A checkpoint folder and how the engine runs it."""

    name: str
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    generates: bool = True
    """Whether this engine can; if not, digests alone tell."""

    @property
    def adapter(self) -> Path | None:
        """A LoRA adapter beside the weights, if there is one."""
        adapter = self.folder / "adapter"
        return adapter if adapter.is_dir() else None


@dataclass(frozen=True)
class Write:
    """New values of a checkpoint tensor: all of it, one expert's slice, or some elements."""

    tensor: str
    values: torch.Tensor
    expert: int | None = None
    indices: torch.Tensor | None = None

    def apply(self, tensors: dict[str, torch.Tensor]) -> None:
        """Make the same change to a checkpoint in memory."""
        whole = tensors[self.tensor]
        if self.indices is not None:
            whole.view(-1)[self.indices] = self.values
        elif self.expert is not None:
            whole[self.expert] = self.values
        else:
            whole.copy_(self.values)


class Engine:
    """An engine in this process with Graft's worker extension, and what its ranks answer."""

    def __init__(self, row: Row, folder: Path, scratch: Path) -> None:
        self._scratch = scratch
        self.llm = LLM(
            str(folder),
            max_model_len=256,
            max_num_seqs=4,
            worker_extension_cls="loaders.engine.worker.GraftWorker",
            **({"enforce_eager": True} | row.options),
        )
        self.generates = row.generates
        self.adapter = LoRARequest("adapter", 1, str(row.adapter)) if row.adapter else None
        self.version = 0
        self.rpc("graft_begin")
        views = [value["tensors"] for value in self.rpc("graft_describe")]
        self.ties = {v["name"]: v["tied_to"] for v in views[0] if v["tied_to"]}
        self.treatments: dict[str, list[dict[str, Any]]] = {
            rank[0]["name"]: list(rank) for rank in zip(*views, strict=True)
        }

    def rpc(self, method: str, *arguments: str) -> list[Any]:
        """Every rank's answer. Raises RuntimeError if one is an error."""
        answers = [
            json.loads(a) for a in self.llm.collective_rpc(method, args=(uuid.uuid4().hex, *arguments))
        ]
        for answer in answers:
            if answer["error"]:
                raise RuntimeError(f"rank {answer['rank']}: {answer['error']}")
        return [answer["value"] for answer in answers]

    def job(self, method: str, *arguments: str) -> list[Any]:
        """Start a job on every rank and wait for all."""
        nonce = uuid.uuid4().hex
        self.llm.collective_rpc(method, args=(nonce, *arguments))
        done: dict[int, Any] = {}
        while True:
            for text in self.llm.collective_rpc("graft_poll", args=(uuid.uuid4().hex, nonce)):
                answer = json.loads(text)
                if answer["rank"] in done or answer["pending"]:
                    continue
                if answer["error"]:
                    raise RuntimeError(f"rank {answer['rank']}: {answer['error']}")
                done[answer["rank"]] = answer["value"]
            if len(done) == len(self.rpc("graft_state")):
                return [done[rank] for rank in sorted(done)]

    def supported(self) -> list[str]:
        """Checkpoint tensors that no rank refuses."""
        return [
            name
            for name, ranks in self.treatments.items()
            if all(
                view["treatment"] != "unsupported" or view["reason"] == "the engine does not load it"
                for view in ranks
            )
            and any(view["treatment"] != "unsupported" for view in ranks)
        ]

    def commit(self, writes: Iterable[Write]) -> list[int]:
        """Both phases with the writes as one staged file; the ranks that took something of it."""
        body = bytearray()
        spans = []

        def span(tensor: torch.Tensor) -> dict[str, int]:
            offset = len(body)
            body.extend(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
            return {"offset": offset, "nbytes": len(body) - offset}

        for write in writes:
            indices = None
            if write.indices is not None:
                indices = IndexSpan(dtype=Dtype.I64, **span(write.indices))
            values = Span(**span(write.values))
            spans.append(
                TensorWrite(tensor=write.tensor, expert=write.expert, values=values, indices=indices)
            )
        path = self._scratch / f"{uuid.uuid4().hex}.bin"
        path.write_bytes(body)
        digest = blake3(bytes(body)).hexdigest()
        staged = StagedUpload(path=str(path), nbytes=len(body), blake3=digest, writes=tuple(spans))
        reports = self._both(uploads=(staged,))
        path.unlink()
        return [report["rank"] for report in reports if report["elements"]]

    def refused(self, writes: Iterable[Write]) -> str:
        """Why phase one refuses the writes; empty if it does not."""
        try:
            self.commit(writes)
        except RuntimeError as error:
            return str(error)
        return ""

    def rollback(self, version: int) -> None:
        """To an earlier version, by undo."""
        self._both(restore=version)

    def _both(self, **what: Any) -> list[Any]:
        request = PrepareRequest(nonce="n", key="k", base_version=self.version, timeout_s=60, **what)
        reports = self.job("graft_start_prepare", request.model_dump_json())
        self.version += 1
        self.rpc("graft_apply", CommitRequest(nonce="n", key="k", version=self.version).model_dump_json())
        self.rpc("graft_settle", "k")
        return reports

    def digests(self) -> dict[str, str]:
        """Digest of every runtime tensor and handle by rank and name."""
        ranks = self.job("graft_start_digests", DigestsRequest(nonce="n").model_dump_json())
        return {
            f"{rank}:{tensor['name']}": tensor["blake3"]
            for rank, value in enumerate(ranks)
            for tensor in value["digests"]["tensors"]
        }

    def answers(self) -> list[Any]:
        """Greedy tokens and their logprobs, nothing cached; by the adapter too, if there is one."""
        self.llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        if self.adapter:
            outputs += self.llm.generate(prompts, sampling, use_tqdm=False, lora_request=self.adapter)
        return [
            (token, position[token].logprob)
            for output in outputs
            for token, position in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        ]

    def state(self) -> tuple[dict[str, str], list[Any]]:
        """What must be equal when the weights are."""
        return self.digests(), self.answers() if self.generates else []

    def close(self) -> None:
        """End it, so that another can start."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm


@contextmanager
def engine_on(row: Row, folder: Path, scratch: Path) -> Iterator[Engine]:
    """An engine for a while."""
    try:
        engine = Engine(row, folder, scratch)
        try:
            yield engine
        finally:
            engine.close()
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()


def altered(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Other values of the same kind: none is as it was, and all are of its size."""
    if not tensor.is_floating_point():
        if tensor.dtype in (torch.uint8, torch.int32):
            return tensor ^ 0x33 * (0x1010101 if tensor.dtype is torch.int32 else 1)
        return (tensor.to(torch.int16) * -1 + 3).clamp(-127, 127).to(tensor.dtype)
    factor = 0.7 + 0.5 * torch.rand(tensor.shape, generator=generator)
    return (tensor.float() * factor).to(tensor.dtype)


def sparse(name: str, tensor: torch.Tensor, generator: torch.Generator) -> Write:
    """One in twenty elements, unsorted."""
    count = max(1, tensor.numel() // 20)
    indices = torch.randperm(tensor.numel(), generator=generator)[:count]
    return Write(name, altered(tensor.view(-1)[indices], generator), indices=indices)


EXPERT = re.compile(r"(?P<stack>.*\.experts)\.(?P<number>\d+)\.")
"""A tensor of one expert."""
STACKED = re.compile(r"(.*\.experts|.*block_sparse_moe)\.([a-z_]+|(in|out)put_linear\.weight)$")
"""A tensor that stacks experts on its first dimension: gpt-oss and Granite."""


def one_by_one(names: list[str], tensors: dict[str, torch.Tensor]) -> dict[str, list[Write]]:
    """The writes of every expert of every layer with its own weights, an expert at a time."""
    found: dict[str, list[Write]] = defaultdict(list)
    for name in names:
        match = EXPERT.match(name)
        if match:
            found[f"{match['stack']}.{match['number']}"].append(Write(name, tensors[name]))
        elif STACKED.match(name):
            for number, own in enumerate(tensors[name]):
                found[f"{STACKED.match(name)[1]}.{number}"].append(Write(name, own, expert=number))
    return found


def run(row: Row, scratch: Path) -> dict[str, Any]:
    """Everything that is asked of a row; the values are booleans but for what is counted."""
    tensors = tensors_of(row.folder)
    generator = torch.Generator().manual_seed(3)
    found: dict[str, Any] = {"name": row.name}
    with engine_on(row, row.folder, scratch) as engine:
        names = engine.supported()
        found["treatments"] = {n: worst(views) for n, views in engine.treatments.items()}
        found["refused"] = {
            n: [v["reason"] for v in views] for n, views in engine.treatments.items() if n not in names
        }
        base = engine.state()
        for time in ("identity", "identity_again", "identity_thrice"):
            engine.commit(Write(name, tensors[name]) for name in names)
            found[time] = engine.state() == base
        found["took"] = {
            number: engine.commit(writes) for number, writes in one_by_one(names, tensors).items()
        }
        found["experts_one_by_one"] = engine.state() == base
        found["alone"] = {
            name: engine.refused([sparse(name, tensors[name], generator)])
            for name in {*engine.ties, *engine.ties.values()}
        }
        free = [name for name in names if name not in engine.ties]
        changes = [[sparse(name, tensors[name], generator) for name in free]]
        changes.append([Write(name, altered(tensors[name], generator)) for name in free[::3]])
        stacked = [name for name in names if STACKED.match(name)]
        changes[1] += [Write(name, altered(tensors[name][1], generator), expert=1) for name in stacked[::2]]
        for writes in changes:
            for tied, root in engine.ties.items():
                writes += [replace(write, tensor=tied) for write in writes if write.tensor == root]
            engine.commit(writes)
            for write in writes:
                write.apply(tensors)
        changed = engine.state()
        found["changes_answers"] = changed[1] != base[1] if row.generates else changed[0] != base[0]
        moved = {n.partition(":")[2] for n in base[0] if changed[0][n] != base[0][n]}
        found["unmoved"] = sorted({n.partition(":")[2] for n in base[0]} - moved)
        version = engine.version
        alone = [name for name in free if name not in engine.ties.values()]
        for name in alone[:: max(1, len(alone) // 4)]:
            for _ in range(10):
                engine.commit([sparse(name, tensors[name], generator)])
        engine.rollback(version)
        found["ten_on_one_and_back"] = engine.state() == changed
        engine.rollback(0)
        found["rollback"] = engine.state() == base
    folder = change(row.folder, scratch / f"{row.name}-changed", lambda kept: kept.update(tensors))
    with engine_on(row, folder, scratch) as oracle:
        fresh = oracle.state()
        found["digests_as_fresh"] = fresh[0] == changed[0]
        found["differ"] = sorted(n for n in fresh[0] if changed[0].get(n) != fresh[0][n])
        found["answers_as_fresh"] = fresh[1] == changed[1]
    return found


def worst(views: list[dict[str, Any]]) -> str:
    """What a tensor's treatment is on the hardest rank that holds it."""
    order = ("direct", "rebuilt", "unsupported")
    held = [v for v in views if v["reason"] != "the engine does not load it"] or views
    return max((v["treatment"] for v in held), key=order.index)


def main(rows: Path, scratch: Path) -> None:
    """Run the rows of a JSON file; one line of JSON for each."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for item in json.loads(rows.read_text()):
        row = Row(item["name"], Path(item["folder"]), item["options"], item["generates"])
        try:
            found = run(row, scratch)
        except Exception as error:  # noqa: BLE001 - told to the test, which fails
            sys.excepthook(*sys.exc_info())
            found = {"name": row.name, "error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(found) + "\n")
        out.flush()


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
