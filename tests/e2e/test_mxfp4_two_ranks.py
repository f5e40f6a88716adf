"""An MXFP4 gpt-oss on two ranks (tensor parallel): each takes its part of packed bytes, one the bias."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from tests.e2e.biases import check_the_first_rank_alone_has_it
from tests.e2e.bodies import Dense, batch, plain
from tests.e2e.conftest import Stacks
from tests.e2e.packed import PACKED, STREAMING, make_model, reference, streamed
from tests.e2e.stack import Answer, Stack
from tests.e2e.weights import Weights, altered, same_bits

pytestmark = pytest.mark.long

PROMPTS = ([10, 20, 30, 40, 50], [7, 3, 9, 200, 41] * 30)


@pytest.fixture(scope="module")
def variables(root: Path) -> dict[str, str]:
    return reference(root / "reference-two")


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    return make_model(root / "mxfp4-two")


@pytest.fixture(scope="module")
def weights(model: Path) -> Weights:
    """What the engine is thought to have."""
    return Weights(model)


@pytest.fixture
def stack(stacks: Stacks, model: Path, variables: dict[str, str]) -> Stack:
    return stacks.on(model, ranks=2, **variables)


def answers(stack: Stack) -> list[Answer]:
    return [stack.complete(prompt) for prompt in PROMPTS]


def seen(stack: Stack) -> tuple[list[Answer], dict[str, str]]:
    return answers(stack), stack.digests()


def test_s1_own_weights_change_nothing_on_two_ranks(stack: Stack, weights: Weights) -> None:
    """Every expert sent alone, unchanged, three times: both ranks take a half, and all is as it was."""
    before = seen(stack)
    for names in ({name: name for name in STREAMING}, STREAMING, PACKED):
        for layer in range(weights.layers):
            for expert in range(weights.experts):
                body = plain(streamed(weights.expert(layer, expert), names))
                ranks = stack.put_expert(layer, expert, body)["ranks"]
                assert [rank["rank"] for rank in ranks] == [0, 1]
                assert [rank["tensors"] for rank in ranks] == [6, 5]
                assert all(rank["nbytes"] > 0 and rank["digest"] for rank in ranks)
    assert seen(stack) == before


def test_s6_the_down_bias_is_on_the_first_rank_alone(stack: Stack, weights: Weights) -> None:
    """The second rank's bias stays zero, whatever is sent, and its receipts say that it took none."""
    check_the_first_rank_alone_has_it(stack, weights)


def test_s5_changes_on_two_ranks_equal_a_fresh_engine(
    stack: Stack, weights: Weights, stacks: Stacks, root: Path, variables: dict[str, str]
) -> None:
    """Experts, sparse and dense patches end where two fresh ranks start, read back whole, and go back."""
    base = stack.version()
    marks = {base: seen(stack)}
    generator = torch.Generator().manual_seed(6)
    for layer in range(weights.layers):
        for expert in (1, 6):
            for tensor in weights.expert(layer, expert).values():
                tensor.copy_(altered(tensor, generator))
            stack.put_expert(layer, expert, plain(streamed(weights.expert(layer, expert), PACKED)))
    marks[stack.version()] = seen(stack)
    patches = [weights.sparse_like(name, 0.1, 5, torch.int32) for name in weights.tensors]
    packed = [name for name, tensor in weights.tensors.items() if tensor.dtype is torch.uint8]
    dense = [Dense(name, altered(weights.tensors[name], generator)) for name in packed[::3]]
    for changes in (patches, dense):
        stack.patch(batch(*changes))
        weights.apply(changes)
    final = stack.version()
    marks[final] = seen(stack)
    for version in (list(marks)[1], base, final):
        stack.rollback(version)
        assert seen(stack) == marks[version], f"version {version} did not come back"
    for name, tensor in weights.tensors.items():
        got = load(stack.call("GET", f"/v1/tensors/{name}").content)
        assert same_bits(got[name], tensor), name
    oracle = stacks.on(weights.save(root / "mxfp4-two-final"), ranks=2, **variables)
    assert marks[final][1] == oracle.digests()
    assert marks[final][0] == answers(oracle)
