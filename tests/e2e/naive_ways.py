"""vLLM's own ways to change weights beside Graft's, in one engine each; prints JSON. Run by test_naive.

Each way sends the model its own unchanged weights (or the checkpoint it should have),
so that any difference in the answer is damage.
"""

import gc
import json
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import torch
from blake3 import blake3
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from loaders.engine.state import collect
from schemas.bridge import CommitRequest, PrepareRequest, Span, StagedUpload, TensorWrite

LAYER, EXPERT = 0, 3
EXPERTS = f"model.layers.{LAYER}.mlp.experts"


class Engine:
    """An in-process engine with Graft's worker extension."""

    def __init__(self, model: Path, scratch: Path) -> None:
        self.scratch = scratch
        self.weights = load_file(model / "model.safetensors")
        self.llm = LLM(
            str(model),
            enforce_eager=True,
            max_model_len=256,
            worker_extension_cls="loaders.engine.worker.GraftWorker",
        )
        self.version = 0
        self.rpc("graft_begin")

    def rpc(self, method: str, *arguments: str) -> dict[str, Any]:
        (answer,) = self.llm.collective_rpc(method, args=(uuid.uuid4().hex, *arguments))
        parsed: dict[str, Any] = json.loads(answer)
        if parsed["error"]:
            raise RuntimeError(parsed["error"])
        return parsed

    @property
    def runner(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def tokens(self) -> list[int]:
        self.llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        (output,) = self.llm.generate([{"prompt_token_ids": [10, 20, 30, 40, 50]}], sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def addresses(self) -> dict[str, int]:
        """Where every tensor that kernels read lies."""
        return {
            f"{name}.{path}": tensor.data_ptr()
            for name, module in self.runner.model.named_modules()
            for path, tensor in collect(module).tensors.items()
        }

    def expert(self) -> dict[str, torch.Tensor]:
        """One expert under vLLM's streaming names."""
        names = {
            "gate_up_proj": "w13_weight",
            "down_proj": "w2_weight",
            "gate_up_proj_bias": "w13_bias",
            "down_proj_bias": "w2_bias",
        }
        return {
            f"{EXPERTS}.{EXPERT}.{theirs}": self.weights[f"{EXPERTS}.{ours}"][EXPERT].clone()
            for ours, theirs in names.items()
        }

    def graft_expert(self) -> None:
        """The same expert through Graft's two phases."""
        writes, body = [], b""
        for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
            values = (
                self.weights[f"{EXPERTS}.{name}"][EXPERT].contiguous().view(torch.uint8).numpy().tobytes()
            )
            span = Span(offset=len(body), nbytes=len(values))
            writes.append(TensorWrite(tensor=f"{EXPERTS}.{name}", expert=EXPERT, values=span))
            body += values
        path = self.scratch / "expert.bin"
        path.write_bytes(body)
        upload = StagedUpload(
            path=str(path), nbytes=len(body), blake3=blake3(body).hexdigest(), writes=tuple(writes)
        )
        self.graft_commit(uploads=(upload,))

    def graft_commit(self, **what: Any) -> None:
        """Both phases."""
        request = PrepareRequest(nonce="n", key="k", base_version=self.version, timeout_s=60, **what)
        job = self.rpc("graft_start_prepare", request.model_dump_json())["nonce"]
        while self.rpc("graft_poll", job)["pending"]:
            pass
        self.version += 1
        self.rpc("graft_apply", CommitRequest(nonce="n", key="k", version=self.version).model_dump_json())
        self.rpc("graft_settle", "k")

    def graft_everything(self) -> None:
        """Every tensor halved; then back by rollback."""
        before = self.version
        writes, body = [], b""
        for name, tensor in self.weights.items():
            values = (tensor.float() / 2).to(tensor.dtype).contiguous().view(torch.uint8).numpy().tobytes()
            writes.append(TensorWrite(tensor=name, values=Span(offset=len(body), nbytes=len(values))))
            body += values
        path = self.scratch / "everything.bin"
        path.write_bytes(body)
        upload = StagedUpload(
            path=str(path), nbytes=len(body), blake3=blake3(body).hexdigest(), writes=tuple(writes)
        )
        self.graft_commit(uploads=(upload,))
        self.graft_commit(restore=before)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


def stream_expert(engine: Engine) -> None:
    """Stream one expert through `load_weights`, as the sharing of PR #52209 does before processing."""
    engine.runner.model.load_weights(iter(engine.expert().items()))


def reload_expert(engine: Engine) -> None:
    """Feed `reload_weights` with one expert."""
    engine.runner.reload_weights(weights_iterator=iter(engine.expert().items()))


def patch_expert(engine: Engine) -> None:
    """A 1 % identity patch of an expert weight through vLLM's sparse patches."""
    name = f"{EXPERTS}.gate_up_proj"
    weight = engine.weights[name]
    indices = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(0))[
        : weight.numel() // 100
    ]
    patch = CheckpointWeightPatch(name, tuple(weight.shape), weight.dtype, weight.view(-1)[indices], indices)
    load_checkpoint_weight_patches(engine.runner.model, [patch])


def measure(model: Path, scratch: Path, naive: Callable[[Engine], None]) -> dict[str, list[int]]:
    """Tokens at first, after Graft's way, and after the naive way."""
    engine = Engine(model, scratch)
    first = engine.tokens()
    engine.graft_expert()
    graft = engine.tokens()
    naive(engine)
    found = {"first": first, "graft": graft, "naive": engine.tokens()}
    engine.close()
    return found


def addresses(model: Path, scratch: Path) -> dict[str, Any]:
    """Addresses and tokens before and after Graft changed every tensor and rolled back."""
    engine = Engine(model, scratch)
    first = engine.tokens()
    before = engine.addresses()
    engine.graft_everything()
    after = engine.addresses()
    moved = [name for name in before if before[name] != after.get(name)]
    found = {"tensors": len(before), "moved": moved, "same": engine.tokens() == first}
    engine.close()
    return found


def reload_changed(model: Path, changed: Path, scratch: Path) -> dict[str, list[int]]:
    """`reload_weights` from another checkpoint, beside an engine that was started on it."""
    engine = Engine(changed, scratch)
    fresh = engine.tokens()
    engine.close()
    engine = Engine(model, scratch)
    first = engine.tokens()
    engine.runner.reload_weights(weights_path=str(changed))
    found = {"first": first, "fresh": fresh, "naive": engine.tokens()}
    engine.close()
    return found


def main(model: Path, changed: Path, scratch: Path) -> None:
    found: dict[str, Any] = {
        naive.__name__: measure(model, scratch, naive)
        for naive in (stream_expert, patch_expert, reload_expert)
    }
    found["addresses"] = addresses(model, scratch)
    found["reload_changed"] = reload_changed(model, changed, scratch)
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
