"""A toy gpt-oss behind `graft serve`: identity, change, rollback, failure and load, on the real engine."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from tests.e2e.bodies import Dense, Sparse, batch, plain
from tests.e2e.conftest import Stacks
from tests.e2e.stack import Answer, Stack
from tests.e2e.weights import Weights, same_bits

SHORT = [10, 20, 30, 40, 50]
LONG = [7, 3, 9, 200, 41] * 60 + SHORT
"""Longer than two KV blocks of 128, so that its prefix is cached."""
PROMPTS = (SHORT, LONG, [5] * 40 + list(range(60, 90)))


@pytest.fixture(scope="module")
def weights(gptoss_model: Path) -> Weights:
    """What the engine is thought to have; tests that change it leave engine and this in step."""
    return Weights(gptoss_model)


def answers(stack: Stack) -> list[Answer]:
    return [stack.complete(prompt) for prompt in PROMPTS]


def seen(stack: Stack) -> tuple[list[Answer], dict[str, str]]:
    """All that identity and rollback must bring back."""
    return answers(stack), stack.digests()


@pytest.mark.parametrize("time", ["once", "twice"])
def test_s1_every_expert_with_its_own_weights_changes_nothing(
    gptoss: Stack, weights: Weights, time: str
) -> None:
    """Uploading every expert one by one, unchanged, leaves tokens, log-probabilities and digests."""
    before = seen(gptoss)
    for layer in range(weights.layers):
        for expert in range(weights.experts):
            receipt = gptoss.put_expert(layer, expert, plain(weights.expert(layer, expert)))
            assert receipt["experts"] == 1 and receipt["nbytes"]["written"] > 0
    assert seen(gptoss) == before


@pytest.mark.parametrize("time", ["once", "twice"])
def test_s4_every_tensor_as_patch_with_its_own_values_changes_nothing(
    gptoss: Stack, weights: Weights, time: str
) -> None:
    """Every tensor as a dense and as a sparse identity patch leaves everything as it was."""
    before = seen(gptoss)
    for name, tensor in weights.tensors.items():
        indices = torch.randperm(tensor.numel())[: max(1, tensor.numel() // 3)]
        gptoss.patch(batch(Sparse(name, tuple(tensor.shape), indices, tensor.view(-1)[indices])))
        gptoss.patch(batch(Dense(name, tensor)))
    assert seen(gptoss) == before


@pytest.mark.parametrize("time", ["once", "twice"])
def test_s5_checkpoint_file_as_plain_body_changes_nothing(
    gptoss: Stack, gptoss_model: Path, time: str
) -> None:
    """The checkpoint file itself, sent as it is, leaves everything as it was."""
    before = seen(gptoss)
    (file,) = gptoss_model.glob("*.safetensors")
    gptoss.patch(file.read_bytes())
    assert seen(gptoss) == before


def test_s1_one_expert_uploaded_leaves_all_others(gptoss: Stack, weights: Weights) -> None:
    """A changed expert reads back as sent, and every other tensor bit for bit as before."""
    version = gptoss.version()
    sent = {name: torch.randn(t.shape).to(t.dtype) for name, t in weights.expert(1, 5).items()}
    gptoss.put_expert(1, 5, plain(sent))
    assert {name: same_bits(t, sent[name]) for name, t in read_expert(gptoss, 1, 5).items()} == dict.fromkeys(
        sent, True
    )
    for layer in range(weights.layers):
        for expert in range(weights.experts):
            if (layer, expert) != (1, 5):
                assert_same(read_expert(gptoss, layer, expert), weights.expert(layer, expert))
    for name in weights.tensors:
        if ".experts." not in name:
            assert_same(read_tensor(gptoss, name), {name: weights.tensors[name]})
    gptoss.rollback(version)


def test_s4_one_element_patched_changes_one_element(gptoss: Stack, weights: Weights) -> None:
    """One element of every tensor patched: exactly that element differs in the read-back."""
    version = gptoss.version()
    for name, tensor in weights.tensors.items():
        position = tensor.numel() - 1
        value = (tensor.view(-1)[position].float() + 1.5).to(tensor.dtype).view(1)
        gptoss.patch(batch(Sparse(name, tuple(tensor.shape), torch.tensor([position]), value)))
        wanted = tensor.clone()
        wanted.view(-1)[position] = value[0]
        assert_same(read_tensor(gptoss, name), {name: wanted})
    gptoss.rollback(version)


def test_s3_old_and_new_names_reach_the_same_weights(gptoss: Stack, weights: Weights) -> None:
    """Old, new and streaming names, in files and patches, of an expert and of the stack: one and the same."""
    version = gptoss.version()
    stack = "model.layers.1.mlp.experts.down_proj_bias"
    wanted = weights.tensors[stack].clone()
    new = torch.arange(wanted.shape[1]).to(wanted.dtype)
    for number, inserted in enumerate(("", "routed_experts.", "base_layer.", "base_layer.routed_experts.")):
        prefix = f"model.layers.1.mlp.experts.{inserted}"
        for last in ("w2_bias", "down_proj_bias"):
            one, place = f"{prefix}{number}.{last}", torch.tensor([number, 9])
            gptoss.patch(plain({one: new}))
            gptoss.patch(batch(Dense(one, new + 1), Sparse(one, tuple(new.shape), place, new[:2])))
            gptoss.patch(batch(Sparse(prefix + last, tuple(wanted.shape), place + 5, new[2:4])))
            wanted[number] = new + 1
            wanted[number][place] = new[:2]
            wanted.view(-1)[place + 5] = new[2:4]
            assert_same(read_tensor(gptoss, stack), {stack: wanted})
            gptoss.put_expert(1, number, plain({one: new}), partial=True)
            wanted[number] = new
            assert_same(read_tensor(gptoss, stack), {stack: wanted})
    gptoss.rollback(version)


def test_failure_in_a_worker_is_undone(gptoss: Stack, weights: Weights) -> None:
    """A worker that fails before, amid or after its write is undone, and the next commit works."""
    version = gptoss.version()
    before = seen(gptoss)
    body = batch(*(weights.sparse_like(name, 0.05, 11, torch.int64) for name in weights.tensors))
    for point in ("apply.before", "apply.middle", "apply.after"):
        (gptoss.failpoints / point).touch()
        with gptoss.transaction() as transaction:
            transaction.patches(body)
            answer = transaction.commit()
        assert answer.status_code == 503
        problem = answer.json()
        assert problem["code"] == "commit_undone"
        assert [rank["ok"] for rank in problem["ranks"]] == [False]
        assert not (gptoss.failpoints / point).exists(), "the failpoint did not fire"
        assert gptoss.version() == version
        assert seen(gptoss) == before
        assert gptoss.staged_files() == []
    assert int(gptoss.patch(body)["version"]) == version + 1
    assert seen(gptoss) != before
    gptoss.rollback(version)
    assert seen(gptoss) == before


def test_failure_in_prepare_changes_nothing(gptoss: Stack, weights: Weights) -> None:
    """A worker that fails in phase one costs nothing but the transaction."""
    version = gptoss.version()
    (gptoss.failpoints / "prepare").touch()
    with gptoss.transaction() as transaction:
        transaction.expert(0, 0, plain(weights.expert(0, 0)))
        answer = transaction.commit()
    assert (answer.status_code, answer.json()["code"]) == (503, "prepare_failed")
    assert gptoss.version() == version


def test_streams_survive_commits_and_rollbacks(gptoss: Stack, weights: Weights) -> None:
    """Streams run while versions come and go: every one ends with all the tokens it asked for."""
    version = gptoss.version()
    ends: list[list[str]] = []
    enough = threading.Event()

    def follow(index: int) -> None:
        while not enough.is_set():
            ends.append(list(gptoss.stream([*SHORT, index], 200))[-2:])

    threads = [threading.Thread(target=follow, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    try:
        for number, name in enumerate(list(weights.tensors)[:4]):
            gptoss.patch(batch(weights.sparse_like(name, 0.1, number, torch.int32)))
            gptoss.rollback(version)
    finally:
        enough.set()
        for thread in threads:
            thread.join()
    assert len(ends) >= len(threads)
    assert ends == [["length", "200"]] * len(ends)


def test_versions_are_stamped_on_completions(gptoss: Stack, weights: Weights) -> None:
    """A completion carries the weight version that made it, after commits and rollbacks alike."""
    version = gptoss.version()
    assert gptoss.stamped_version(SHORT) == {str(version)}
    gptoss.put_expert(0, 1, plain(weights.expert(0, 1)))
    assert gptoss.stamped_version(SHORT) == {str(version + 1)}
    gptoss.rollback(version)
    assert gptoss.stamped_version(SHORT) == {str(version + 2)}


def test_s4_accumulated_changes_equal_a_fresh_engine(
    gptoss: Stack, weights: Weights, stacks: Stacks, root: Path
) -> None:
    """A long series of changes of all kinds ends where a fresh engine on the same weights starts.

    Rolled back to several of the versions in any order, everything comes back bit for bit.
    """
    base = gptoss.version()
    marks = {base: seen(gptoss)}
    change_experts(gptoss, weights)
    marks[gptoss.version()] = seen(gptoss)
    change_sparsely(gptoss, weights)
    marks[gptoss.version()] = seen(gptoss)
    change_densely(gptoss, weights)
    final = gptoss.version()
    marks[final] = seen(gptoss)
    oracle = stacks.on(weights.save(root / "gptoss-final"))
    assert marks[final][1] == oracle.digests()
    assert marks[final][0] == answers(oracle)
    for version in (base, *list(marks)[1:], base, final, list(marks)[1], final):
        assert gptoss.rollback(version)["restores"] == str(version)
        assert seen(gptoss) == marks[version], f"version {version} did not come back"


def change_experts(stack: Stack, weights: Weights) -> None:
    """Upload two thirds of all experts, changed, some one by one and some in a transaction."""
    generator = torch.Generator().manual_seed(5)
    with stack.transaction(label="experts") as transaction:
        for layer in range(weights.layers):
            for expert in range(weights.experts):
                if (layer + expert) % 3 == 2:
                    continue
                for tensor in weights.expert(layer, expert).values():
                    noise = torch.randn(tensor.shape, generator=generator) * 0.1
                    tensor.copy_(
                        (tensor.float() * 0.8 + noise * float(tensor.float().std())).to(tensor.dtype)
                    )
                body = plain(weights.expert(layer, expert))
                if expert % 2:
                    transaction.expert(layer, expert, body)
                else:
                    stack.put_expert(layer, expert, body)
        assert transaction.commit().status_code == 200


def change_sparsely(stack: Stack, weights: Weights) -> None:
    """Sparse patches of 0.01 to 30 % on every tensor, several in a batch, indices of both widths."""
    for number, density in enumerate((0.0001, 0.001, 0.01, 0.1, 0.3)):
        patches = [
            weights.sparse_like(name, density, number, (torch.int32, torch.int64)[number % 2])
            for name in weights.tensors
        ]
        stack.patch(batch(*patches))
        weights.apply(patches)


def change_densely(stack: Stack, weights: Weights) -> None:
    """Dense patches on every third tensor, and one batch that mixes sparse, dense and sparse on one name."""
    names = list(weights.tensors)[::3]
    dense = [Dense(name, (weights.tensors[name].float() * 0.97).to(torch.bfloat16)) for name in names]
    stack.patch(batch(*dense))
    weights.apply(dense)
    for name in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.self_attn.q_proj.weight"):
        mixed = [
            weights.sparse_like(name, 0.2, 1, torch.int64),
            Dense(name, (weights.tensors[name].float() * 1.02).to(torch.bfloat16)),
            weights.sparse_like(name, 0.02, 2, torch.int32),
        ]
        stack.patch(batch(*mixed))
        weights.apply(mixed)


def read_expert(stack: Stack, layer: int, expert: int) -> dict[str, torch.Tensor]:
    answer = stack.call("GET", f"/v1/experts/{layer}/{expert}")
    assert answer.headers["etag"] == f'"{stack.version()}"'
    return load(answer.content)


def read_tensor(stack: Stack, name: str) -> dict[str, torch.Tensor]:
    return load(stack.call("GET", f"/v1/tensors/{name}").content)


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert same_bits(got[name], wanted[name]), f"{name} differs"
