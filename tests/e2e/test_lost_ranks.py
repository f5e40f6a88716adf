"""One of two ranks hangs or dies: nothing is half done, and what was acknowledged is served again."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from loaders.engine.toy_model import make_toy_gptoss
from tests.e2e.bodies import batch, plain
from tests.e2e.conftest import Stacks
from tests.e2e.stack import Answer, Stack, until
from tests.e2e.weights import Weights

pytestmark = pytest.mark.long

PROMPTS = ([10, 20, 30, 40, 50], [7, 3, 9, 200, 41] * 60)
BOUNDS = {
    "GRAFT_ENGINE_PREPARE_S": "20",
    "GRAFT_ENGINE_COMMIT_S": "15",
    "GRAFT_ENGINE_ANSWER_S": "10",
    "GRAFT_ENGINE_SETTLE_S": "5",
    "GRAFT_ENGINE_HANG_S": "30",
}


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    """A toy of this module's own: its ranks are killed."""
    make_toy_gptoss(root / "lost", hidden=64, intermediate=128, seed=4)
    return root / "lost"


@pytest.fixture
def stack(stacks: Stacks, model: Path) -> Iterator[Stack]:
    """With a rank that hangs let go at the end, whether it is still there or not."""
    stack = stacks.on(model, ranks=2, **BOUNDS)
    (stack.failpoints / "go-on").unlink(missing_ok=True)
    yield stack
    (stack.failpoints / "go-on").touch()


@pytest.fixture
def body(model: Path) -> bytes:
    """A commit that changes every tensor here and there."""
    weights = Weights(model)
    return batch(*(weights.sparse_like(name, 0.05, 3, torch.int64) for name in weights.tensors))


def seen(stack: Stack) -> tuple[list[Answer], dict[str, str]]:
    return [stack.complete(prompt) for prompt in PROMPTS], stack.digests()


def halve(stack: Stack, model: Path, expert: int) -> int:
    """Commit an expert of half its size; the version that this is."""
    tensors = Weights(model).expert(0, expert)
    halved = {name: (tensor.float() * 0.5).to(torch.bfloat16) for name, tensor in tensors.items()}
    return int(stack.put_expert(0, expert, plain(halved))["version"])


def await_version(stack: Stack, version: int) -> None:
    """Ready again, at this version, and not ready at any other before."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        answer = stack.call("GET", "/health/ready")
        if answer.status_code == 200:
            assert int(answer.json()["version"]) == version
            return
        assert answer.json()["code"] in ("engine_unavailable", "recovering", "state_unknown")
        time.sleep(0.5)
    raise AssertionError(f"not ready again:\n{stack.log}")


def prepared(stack: Stack) -> list[int]:
    """How much each rank holds prepared."""
    stack.call("GET", "/health/ready")  # makes the admin look
    return [rank["prepared"] for rank in stack.json("GET", "/v1/status")["engine"]["ranks"]]


def check_works(stack: Stack, body: bytes, label: str) -> None:
    """The next commit's answer is its own, it changes what is served, and it can be taken back."""
    version, before = stack.version(), seen(stack)
    receipt = stack.patch(body, label=label)
    assert (int(receipt["version"]), receipt["label"]) == (version + 1, label)
    assert [(rank["rank"], rank["nbytes"] > 0) for rank in receipt["ranks"]] == [(0, True), (1, True)]
    assert seen(stack) != before
    stack.rollback(version)
    assert seen(stack) == before


def test_a_rank_that_hangs_in_prepare(stack: Stack, body: bytes) -> None:
    """Phase one is given up at its bound while both ranks serve; a rank that is late keeps nothing."""
    version, before = stack.version(), seen(stack)
    stack.arm("prepare@1", "hang")
    with ThreadPoolExecutor(1) as pool, stack.transaction() as transaction:
        transaction.patches(body)
        commit = pool.submit(transaction.commit)
        until(lambda: not (stack.failpoints / "prepare@1").exists())
        assert stack.complete(PROMPTS[0]) == before[0][0] and not commit.done()
        answer = commit.result()
        assert (answer.status_code, answer.json()["code"]) == (503, "prepare_failed"), answer.text
        assert stack.json("GET", f"/v1/transactions/{transaction.id}")["state"] == "open"
    check_works(stack, body, "beside a rank's thread that hangs")
    (stack.failpoints / "go-on").touch()
    time.sleep(1)
    assert prepared(stack) == [0, 0]
    assert (stack.version(), seen(stack)) == (version + 2, before)


@pytest.mark.parametrize(("number", "what"), [(0, "hang"), (1, "die")])
def test_a_rank_that_is_lost_in_commit(
    stack: Stack, model: Path, body: bytes, number: int, what: str
) -> None:
    """The engine is replaced and replayed, and the ledger says that the commit was undone."""
    version = halve(stack, model, number)
    before = seen(stack)
    stack.arm("apply.middle@1", what)
    with stack.transaction(label=what) as transaction:
        transaction.patches(body)
        answer: httpx.Response = transaction.commit()
    assert (answer.status_code, answer.json()["code"]) == (500, "state_unknown"), answer.text
    await_version(stack, version)
    assert seen(stack) == before
    view = stack.json("GET", f"/v1/transactions/{transaction.id}")
    assert (view["state"], view["problem"]["code"]) == ("failed", "commit_undone")
    check_works(stack, body, f"after a rank that did {what}")


def test_a_rank_that_hangs_outside_of_a_commit(stack: Stack, model: Path, body: bytes) -> None:
    """Nothing is answered any more: the engine is replaced and replayed."""
    version = halve(stack, model, 2)
    before, ranks = seen(stack), stack.processes("VLLM::Worker")
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGSTOP)
    until(lambda: "the engine has answered nothing for" in stack.log)
    await_version(stack, version)
    assert not set(stack.processes("VLLM::Worker")) & set(ranks)
    assert seen(stack) == before
    check_works(stack, body, "after a rank that hung")
