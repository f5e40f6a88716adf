"""The fake engine in a process of its own, of two ranks, and what it should have."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from blake3 import blake3

from tests.app.test_reload import changed
from tests.crash.model import State
from tests.crash.processes import Forked, Process
from tests.crash.rig import Rig
from tests.fakes.admin import expert_body, expert_parts
from tests.fakes.checkpoint import write_checkpoint
from tests.fakes.engine import base_weights, tensors


class FakeEngineRig(Rig):
    """What happens to it is known, so what it has to come to can be computed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.numbers: Iterator[int] = itertools.count(1)
        self.checkpoints: Iterator[int] = itertools.count(1)

    admin_env: Mapping[str, str] = {
        "GRAFT_ENGINE_POLL_S": "0.05",
        "GRAFT_ENGINE_SEEK_S": "0.05",
        "GRAFT_ENGINE_SETTLE_S": "1",
        "GRAFT_ENGINE_PROBE_S": "5",
        "GRAFT_BLOB_BYTES": "4KiB",
    }

    def launch_engine(self, log: Path) -> Process:
        """The module's own command line."""
        arguments = ["--port", str(self.engine_port), "--ranks", "2"]
        arguments += ["--secret", str(self.secret), "--base", str(self.folder / "base")]
        return Forked("tests.fakes.engine", arguments, self.failpoints, log)

    def expert(self, number: int) -> bytes:
        """Random numbers."""
        return expert_body(number)

    def checkpoint(self, number: int) -> Path:
        """Other random numbers in all that can be updated."""
        return write_checkpoint(self.folder / f"other-{number}", changed(number))

    def require_weights(self, state: State, version: int) -> None:
        """Every rank's digests against computed ones."""
        weights = base_weights()
        if state.checkpoint:
            found = changed(state.checkpoint)
            weights = {n: np.frombuffer(bits, weights[n].dtype).copy() for n, (_, _, bits) in found.items()}
        if state.expert:
            shapes = {tensor.name: tensor.shape for tensor in tensors()}
            for short, (_, _, content) in expert_parts(state.expert).items():
                name = f"model.layers.0.mlp.experts.{short}"
                weights[name].reshape(shapes[name])[0].reshape(-1)[:] = np.frombuffer(content, np.uint16)
        expected = {name: blake3(bits.tobytes()).hexdigest() for name, bits in weights.items()}
        for rank, found_digests in enumerate(self.engine_digests()):
            self.require(found_digests == expected, f"rank {rank} has other weights than version {version}")
