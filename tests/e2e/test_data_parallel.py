"""Two engine cores (data parallel): every one of them is changed, read and proved, not only the first."""

from pathlib import Path

import pytest
import torch

from tests.e2e.bodies import Dense, batch
from tests.e2e.conftest import Stacks
from tests.e2e.stack import Stack
from tests.families.models import make_family, tensors_of

pytestmark = pytest.mark.long

PROMPTS = [[10, 20, 30, 40, 50 + number] for number in range(4)]


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    return make_family("llama", root / "llama-dp")


@pytest.fixture
def stack(stacks: Stacks, model: Path) -> Stack:
    return stacks.on(model, ranks=2, parallel="data")


def answers(stack: Stack) -> list[object]:
    """Each prompt twice: vLLM spreads requests over its engines."""
    return [stack.complete(prompt) for prompt in PROMPTS for _ in range(2)]


def test_s1_every_engine_changes_and_comes_back(
    stack: Stack, stacks: Stacks, model: Path, root: Path
) -> None:
    """A patch of every tensor: both engines report, equal each other and a fresh engine, and come back."""
    before, digests = answers(stack), stack.digests()
    assert {name.partition(":")[0] for name in digests} == {"0", "1"}
    generator = torch.Generator().manual_seed(4)
    changed = {
        name: (t.float() * (0.7 + 0.5 * torch.rand(t.shape, generator=generator))).to(t.dtype)
        for name, t in tensors_of(model).items()
    }
    receipt = stack.patch(batch(*(Dense(name, tensor) for name, tensor in changed.items())))
    assert [rank["rank"] for rank in receipt["ranks"]] == [0, 1]
    assert len({rank["digest"] for rank in receipt["ranks"]}) == 1
    after = answers(stack)
    assert after != before and after[::2] == after[1::2]
    now = stack.digests()
    assert all(now[f"1:{name[2:]}"] == digest for name, digest in now.items() if name.startswith("0:"))
    stack.rollback(0)
    assert (answers(stack), stack.digests()) == (before, digests)
