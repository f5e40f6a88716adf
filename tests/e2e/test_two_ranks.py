"""Two ranks (tensor parallel): both change or neither, and each reports for itself."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from loaders.engine.toy_model import make_toy_gptoss, make_toy_mixtral
from tests.e2e.biases import check_the_first_rank_alone_has_it
from tests.e2e.bodies import Dense, Sparse, batch, plain
from tests.e2e.conftest import Stacks
from tests.e2e.stack import Answer, Stack
from tests.e2e.weights import Weights, same_bits

pytestmark = pytest.mark.long

PROMPTS = ([10, 20, 30, 40, 50], [7, 3, 9, 200, 41] * 60)


@pytest.fixture(scope="module", params=["gptoss", "mixtral"])
def model(request: pytest.FixtureRequest, root: Path) -> Path:
    """A toy gpt-oss, whose second rank adds no bias, and a Mixtral whose shards are padded."""
    folder = root / f"{request.param}-two"
    if request.param == "gptoss":
        make_toy_gptoss(folder, hidden=64, intermediate=128)
    else:
        make_toy_mixtral(folder, hidden=64, intermediate=96)
    return folder


@pytest.fixture(scope="module")
def weights(model: Path) -> Weights:
    return Weights(model)


@pytest.fixture
def stack(stacks: Stacks, model: Path) -> Stack:
    return stacks.on(model, ranks=2)


def answers(stack: Stack) -> list[Answer]:
    return [stack.complete(prompt) for prompt in PROMPTS]


def seen(stack: Stack) -> tuple[list[Answer], dict[str, str]]:
    return answers(stack), stack.digests()


def test_s1_own_weights_change_nothing_on_two_ranks(stack: Stack, weights: Weights, model: Path) -> None:
    """Experts, every tensor dense and sparse, and the whole file, all unchanged, twice: nothing changes."""
    before = seen(stack)
    for _ in range(2):
        for layer in range(weights.layers):
            for expert in range(weights.experts):
                receipt = stack.put_expert(layer, expert, plain(weights.expert(layer, expert)))
                assert [rank["rank"] for rank in receipt["ranks"]] == [0, 1]
                assert all(rank["nbytes"] > 0 and rank["digest"] for rank in receipt["ranks"])
        patches: list[Sparse | Dense] = []
        for name, tensor in weights.tensors.items():
            indices = torch.randperm(tensor.numel())[: max(1, tensor.numel() // 3)]
            patches.append(Sparse(name, tuple(tensor.shape), indices, tensor.view(-1)[indices]))
            patches.append(Dense(name, tensor))
        stack.patch(batch(*patches))
        (file,) = model.glob("*.safetensors")
        stack.patch(file.read_bytes())
    assert seen(stack) == before


def test_every_tensor_reads_back_whole(stack: Stack, weights: Weights) -> None:
    """Both ranks together give back every checkpoint tensor, and every expert, bit for bit."""
    for name, tensor in weights.tensors.items():
        got = load(stack.call("GET", f"/v1/tensors/{name}").content)
        assert same_bits(got[name], tensor), name
    for expert in range(weights.experts):
        got = load(stack.call("GET", f"/v1/experts/1/{expert}").content)
        for name, tensor in weights.expert(1, expert).items():
            assert same_bits(got[name], tensor), (expert, name)


@pytest.mark.parametrize("model", ["gptoss"], indirect=True)
def test_s6_the_down_bias_is_on_the_first_rank_alone(stack: Stack, weights: Weights) -> None:
    """The second rank's bias stays zero, whatever is sent, and its receipts say that it took none."""
    check_the_first_rank_alone_has_it(stack, weights)


@pytest.mark.parametrize("point", ["apply.before", "apply.middle", "apply.after"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_fails_and_both_are_undone(stack: Stack, weights: Weights, point: str, rank: int) -> None:
    """Either rank fails at any point: both are undone, and the next commit's answers are its own."""
    version = stack.version()
    before = seen(stack)
    body = batch(*(weights.sparse_like(name, 0.05, 3, torch.int64) for name in weights.tensors))
    (stack.failpoints / f"{point}@{rank}").touch()
    with stack.transaction() as transaction:
        transaction.patches(body)
        answer = transaction.commit()
    assert (answer.status_code, answer.json()["code"]) == (503, "commit_undone")
    assert [report["ok"] for report in answer.json()["ranks"]] == [rank == 1, rank == 0]
    assert seen(stack) == before
    receipt = stack.patch(body, label=f"after {point}")
    assert (int(receipt["version"]), receipt["label"]) == (version + 1, f"after {point}")
    assert seen(stack) != before
    stack.rollback(version)
    assert seen(stack) == before


def test_one_rank_fails_to_prepare(stack: Stack, weights: Weights) -> None:
    """A rank that fails in phase one: nothing is kept on the other, and no version is used."""
    version = stack.version()
    (stack.failpoints / "prepare@1").touch()
    with stack.transaction() as transaction:
        transaction.expert(0, 0, plain(weights.expert(0, 0)))
        answer = transaction.commit()
    assert (answer.status_code, answer.json()["code"]) == (503, "prepare_failed")
    assert stack.version() == version
    ranks = stack.json("GET", "/v1/status")["engine"]["ranks"]
    assert [rank["prepared"] for rank in ranks] == [0, 0]


def test_changes_export_and_reload_equal_a_fresh_engine_on_two_ranks(
    stack: Stack, weights: Weights, stacks: Stacks, root: Path, model: Path
) -> None:
    """All changes, and a reload of their export, end where an engine on it starts; rollbacks come back."""
    base = stack.version()
    marks = {base: seen(stack)}
    for layer in range(weights.layers):
        for expert in range(0, weights.experts, 2):
            for tensor in weights.expert(layer, expert).values():
                tensor.copy_((tensor.float() * 0.8).to(tensor.dtype))
            stack.put_expert(layer, expert, plain(weights.expert(layer, expert)))
    marks[stack.version()] = seen(stack)
    for number, density in enumerate((0.001, 0.1)):
        patches = [weights.sparse_like(name, density, number, torch.int32) for name in weights.tensors]
        stack.patch(batch(*patches))
        weights.apply(patches)
    dense = [
        Dense(name, (t.float() * 0.97).to(torch.bfloat16)) for name, t in list(weights.tensors.items())[::4]
    ]
    stack.patch(batch(*dense))
    weights.apply(dense)
    final = stack.version()
    marks[final] = seen(stack)
    for version in (list(marks)[1], base, final):
        stack.rollback(version)
        assert seen(stack) == marks[version], f"version {version} did not come back"
    out = root / f"{model.name}-out"
    stack.export(final, out)
    exported = Weights(out).tensors
    assert exported.keys() == weights.tensors.keys()
    assert all(same_bits(exported[name], tensor) for name, tensor in weights.tensors.items())
    stack.rollback(base)
    reloaded = stack.json("POST", "/v1/reload", json={"path": str(out)})
    assert [rank["rank"] for rank in reloaded["ranks"]] == [0, 1]
    assert seen(stack) == marks[final]
    stack.rollback(base)
    assert seen(stack) == marks[base]
    oracle = stacks.on(out, ranks=2)
    assert marks[final][1] == oracle.digests()
    assert marks[final][0] == answers(oracle)
