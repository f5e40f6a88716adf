"""vLLM on a toy gpt-oss, and what it should have: what an engine had that nobody killed."""

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save

from app.supervisor import engine_command
from app.supported import installed_vllm
from loaders.engine.toy_model import make_toy_gptoss
from tests.crash.model import State
from tests.crash.processes import Process, Spawned
from tests.crash.rig import Rig

EXPERTS = 3
PROMPT = [10, 20, 30, 40, 50]
STACK = "model.layers.0.mlp.experts."


class VllmRig(Rig):
    """Few states, gone through once in peace; later every version of a state must look the same."""

    admin_env: Mapping[str, str] = {
        "GRAFT_ENGINE_POLL_S": "0.2",
        "GRAFT_ENGINE_SETTLE_S": "5",
    }
    patience_s = 400.0
    death_s = 20.0
    doubt_s = 3.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.numbers: Iterator[int] = itertools.cycle(range(1, EXPERTS + 1))
        self.checkpoints: Iterator[int] = itertools.repeat(1)
        self.model = folder / "base"
        make_toy_gptoss(self.model, hidden=64, intermediate=96, seed=3)
        make_toy_gptoss(folder / "other", hidden=64, intermediate=96, seed=4)
        self._known: dict[State, tuple[object, object]] = {}

    def launch_engine(self, log: Path) -> Process:
        """As `graft serve` would start it."""
        flags = ["--enforce-eager", "--max-model-len", "256"]
        environ = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
        command = engine_command(
            str(self.model),
            host="127.0.0.1",
            port=self.engine_port,
            vllm_args=flags,
            secret_file=self.secret,
            log=log,
            vllm=installed_vllm(),
            environ=environ,
        )
        return Spawned(command.argv[1:], command.env, log)

    @property
    def rehearsal(self) -> list[State]:
        """All that the trials lead to, each one change after the other."""
        return [State(checkpoint, expert) for checkpoint in (0, 1) for expert in range(EXPERTS + 1)]

    def expert(self, number: int) -> bytes:
        """Large random numbers, so that tokens show them."""
        generator = torch.Generator().manual_seed(number)
        found = load_file(next(self.model.glob("*.safetensors")))
        experts = {name.removeprefix(STACK): t[0] for name, t in found.items() if name.startswith(STACK)}
        return save({n: torch.randn(t.shape, generator=generator).to(t.dtype) for n, t in experts.items()})

    def checkpoint(self, number: int) -> Path:
        """A toy of another seed."""
        return self.folder / "other"

    def learn(self, state: State) -> None:
        """The engine has this state, in peace."""
        seen = self._seen()
        assert all(seen[place] != other[place] for other in self._known.values() for place in (0, 1))
        self._known[state] = seen

    def require_weights(self, state: State, version: int) -> None:
        """Digests and a completion's tokens against what they were in peace."""
        self.require(self._seen() == self._known[state], f"the weights of version {version} are others")

    def _seen(self) -> tuple[object, object]:
        body = {"model": str(self.model), "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        body |= {"ignore_eos": True, "logprobs": 1}
        url = f"http://127.0.0.1:{self.engine_port}/v1/completions"
        answer: dict[str, Any] = httpx.post(url, json=body, timeout=60).raise_for_status().json()
        return self.engine_digests(), answer["choices"][0]["logprobs"]["tokens"]
