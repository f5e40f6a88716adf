"""Engine and admin killed on the real thing: what was acknowledged is served again, bit for bit."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from loaders.engine.toy_model import make_toy_gptoss
from tests.e2e.bodies import batch, plain
from tests.e2e.conftest import Stacks
from tests.e2e.stack import Answer, Stack
from tests.e2e.weights import Weights

pytestmark = pytest.mark.long

PROMPTS = ([10, 20, 30, 40, 50], [7, 3, 9, 200, 41] * 60)


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    """A toy of this module's own: its stack is killed."""
    make_toy_gptoss(root / "killed", hidden=64, intermediate=96, seed=3)
    return root / "killed"


@pytest.fixture
def stack(stacks: Stacks, model: Path) -> Stack:
    return stacks.on(model)


def seen(stack: Stack) -> tuple[list[Answer], dict[str, str]]:
    return [stack.complete(prompt) for prompt in PROMPTS], stack.digests()


def change(stack: Stack, model: Path) -> None:
    """Two commits, a rollback to the first of them, and another commit."""
    weights = Weights(model)
    expert = {name: (t.float() * 0.5).to(torch.bfloat16) for name, t in weights.expert(0, 2).items()}
    first = int(stack.put_expert(0, 2, plain(expert))["version"])
    names = [name for name in weights.tensors if "experts" not in name]
    stack.patch(batch(*(weights.sparse_like(name, 0.2, 1, torch.int64) for name in names)))
    stack.rollback(first)
    stack.patch(batch(*(weights.sparse_like(name, 0.05, 2, torch.int32) for name in names[::2])))


def engine_pid(stack: Stack) -> int:
    pid: int = json.loads((stack.folder / "state" / "engine.json").read_text())["pid"]
    return pid


def kill_engine(stack: Stack) -> None:
    """The whole process group of the engine, at once."""
    os.killpg(engine_pid(stack), signal.SIGKILL)


def await_version(stack: Stack, version: int) -> None:
    """Ready again, at this version; not ready with another one in between."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        try:
            answer = stack.call("GET", "/health/ready")
        except OSError:
            continue
        if answer.status_code == 200:
            assert int(answer.json()["version"]) == version
            return
        assert answer.json()["code"] in ("engine_unavailable", "recovering")
        time.sleep(0.5)
    raise AssertionError(f"not ready again:\n{stack.log}")


def test_killed_engine_is_restarted_and_replayed(stack: Stack, model: Path) -> None:
    """The engine is killed: another one is started and brought to the version, same tokens and digests."""
    change(stack, model)
    version, before = stack.version(), seen(stack)
    kill_engine(stack)
    while stack.call("GET", "/health/ready").status_code == 200:
        time.sleep(0.1)
    await_version(stack, version)
    assert seen(stack) == before
    assert stack.rollback(0)["restores"] == "0", (
        "undo went with the engine; the base checkpoint is still there"
    )
    weights = Weights(model)
    assert int(stack.put_expert(0, 0, plain(weights.expert(0, 0)))["version"]) == version + 2


def test_killed_admin_adopts_its_engine(stack: Stack, model: Path) -> None:
    """The admin is killed and started again: the same engine goes on at the same version."""
    change(stack, model)
    version, before, engine = stack.version(), seen(stack), engine_pid(stack)
    stack.kill_admin()
    stack.restart()
    assert (stack.version(), engine_pid(stack)) == (version, engine)
    assert seen(stack) == before


def test_both_killed(stack: Stack, model: Path) -> None:
    """Admin and engine are killed: a new admin starts a new engine and brings it to the version."""
    version, before = stack.version(), seen(stack)
    kill_engine(stack)
    stack.kill_admin()
    stack.restart()
    assert stack.version() == version
    assert seen(stack) == before
