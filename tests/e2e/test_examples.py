"""The examples as they stand, each a program of its own, on the demo Mixtral."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file

from tests.e2e.conftest import Stacks
from tests.e2e.stack import Stack
from tests.e2e.weights import same_bits

EXAMPLES = Path(__file__).parents[2] / "examples"
PUSHED = re.compile(r"version (\d+): (\d+) tensors in \d+ bytes, (.+)")
LAYER = "model.layers.29."


@pytest.fixture
def demo(stacks: Stacks, demo_model: Path) -> Iterator[Stack]:
    """The demo model at its base, before and after."""
    stack = stacks.on(demo_model)
    stack.rollback(0)
    yield stack
    stack.rollback(0)


def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """An example's run to its end."""
    command = [sys.executable, str(EXAMPLES / name), *(str(one) for one in arguments)]
    # The engine has one of the cores.
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)


def output(ended: subprocess.CompletedProcess[str]) -> str:
    """What it printed; it has to have ended well."""
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def read_back(stack: Stack, name: str) -> torch.Tensor:
    return load(stack.call("GET", f"/v1/tensors/{name}").content)[name]


def test_a_trainer_pushes_every_n_steps(demo: Stack, tmp_path: Path) -> None:
    """After step 2 and at the end; then the engine runs, bit for bit, what the trainer saves in bf16."""
    begun = demo.version()
    before = demo.digests()
    said = output(
        run(
            "trainer_callback.py",
            demo.model,
            "--url",
            demo.admin,
            "--every",
            2,
            "--steps",
            3,
            "--save",
            tmp_path,
        )
    )
    pushes = PUSHED.findall(said)
    assert [(int(version) - begun, label) for version, _, label in pushes] == [(1, "step 2"), (2, "step 3")]
    saved = load_file(tmp_path / "model.safetensors")
    base = load_file(demo.model / "model.safetensors")
    learnt = {name: tensor.bfloat16() for name, tensor in saved.items() if name.startswith(LAYER)}
    assert len(learnt) == 19
    assert not all(same_bits(tensor, base[name]) for name, tensor in learnt.items())
    for name, tensor in learnt.items():
        assert same_bits(read_back(demo, name), tensor), name
    changed = {name for name, digest in demo.digests().items() if before[name] != digest}
    assert changed
    assert all(LAYER in name for name in changed)


def test_an_rl_loop_learns_from_its_own_samples(demo: Stack) -> None:
    """Each round's samples come from the engine and each round's changes go there, as one version."""
    begun = demo.version()
    before = read_back(demo, f"{LAYER}self_attn.o_proj.weight")
    said = output(
        run(
            "rl_loop.py",
            demo.model,
            "--url",
            demo.admin,
            "--vllm",
            demo.inference,
            "--rounds",
            2,
            "--tokens",
            8,
        )
    )
    pushes = PUSHED.findall(said)
    assert [(int(version) - begun, label) for version, _, label in pushes] == [(1, "round 1"), (2, "round 2")]
    assert len(re.findall(r"reward -?\d", said)) == 2
    assert not same_bits(read_back(demo, f"{LAYER}self_attn.o_proj.weight"), before)


def test_surgery_keeps_what_heals_and_undoes_what_kills(demo: Stack) -> None:
    """A slightly changed expert stays; one that breaks the answers is taken out, and all is as before."""
    options = ("--url", demo.admin, "--vllm", demo.inference)
    said = output(run("expert_surgery.py", 15, 0, 1.01, *options))
    assert re.fullmatch(r"version \d+ stays\n", said)
    healthy, begun = demo.digests(), demo.version()
    failed = run("expert_surgery.py", 15, 0, "-50", *options)
    assert failed.returncode == 1, failed.stderr
    assert f"back to {begun} as {begun + 2}" in failed.stdout
    assert demo.version() == begun + 2
    assert demo.digests() == healthy
