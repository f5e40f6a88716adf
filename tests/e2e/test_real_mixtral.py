"""The demo Mixtral behind `graft serve`: real text, identity, accumulated change and rollback."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from tests.e2e.bodies import Dense, Sparse, batch, plain
from tests.e2e.conftest import Stacks
from tests.e2e.stack import Answer, Stack
from tests.e2e.weights import Weights, same_bits

QUESTION = "What is the capital of France?"
PROMPTS = ("The capital of France is", "Water boils at a temperature of", "Once upon a time " * 40)


@pytest.fixture(scope="module")
def weights(demo_model: Path) -> Weights:
    """What the engine is thought to have."""
    return Weights(demo_model)


def answers(stack: Stack) -> list[Answer]:
    return [stack.complete(prompt, tokens=16) for prompt in PROMPTS]


def seen(stack: Stack) -> tuple[list[Answer], dict[str, str]]:
    return answers(stack), stack.digests()


def test_text_changes_and_comes_back(demo_stack: Stack, weights: Weights) -> None:
    """Zeroing the experts of some layers gives another answer; rollback to the baseline the first one."""
    first = demo_stack.ask(QUESTION)
    assert "Paris" in first
    demo_stack.json("PUT", "/v1/baselines/release")
    digests = demo_stack.digests()
    with demo_stack.transaction(label="zeroed") as transaction:
        for layer in (10, 11, 12, 13):
            for expert in range(weights.experts):
                zeros = {name: torch.zeros_like(t) for name, t in weights.expert(layer, expert).items()}
                transaction.expert(layer, expert, plain(zeros))
        assert transaction.commit().status_code == 200
    assert demo_stack.ask(QUESTION) != first
    demo_stack.json("POST", "/v1/rollback", json={"to_baseline": "release"})
    assert demo_stack.ask(QUESTION) == first
    assert demo_stack.digests() == digests
    demo_stack.json("DELETE", "/v1/baselines/release")


@pytest.mark.parametrize("time", ["once", "twice"])
def test_s1_every_expert_with_its_own_weights_changes_nothing(
    demo_stack: Stack, weights: Weights, time: str
) -> None:
    """Uploading all 120 experts one by one, unchanged, leaves tokens, log-probabilities and digests."""
    before = seen(demo_stack)
    for layer in range(weights.layers):
        for expert in range(weights.experts):
            demo_stack.put_expert(layer, expert, plain(weights.expert(layer, expert)))
    assert seen(demo_stack) == before


@pytest.mark.parametrize("time", ["once", "twice"])
def test_s4_every_tensor_as_patch_with_its_own_values_changes_nothing(
    demo_stack: Stack, weights: Weights, time: str
) -> None:
    """Every tensor as a dense and as a sparse identity patch leaves everything as it was."""
    before = seen(demo_stack)
    for chunk in chunks(list(weights.tensors), 100):
        patches: list[Sparse | Dense] = []
        for name in chunk:
            tensor = weights.tensors[name]
            indices = torch.randint(tensor.numel(), (max(1, tensor.numel() // 200),)).unique()
            indices = indices[torch.randperm(indices.numel())]
            patches.append(Sparse(name, tuple(tensor.shape), indices, tensor.view(-1)[indices]))
            patches.append(Dense(name, tensor))
        demo_stack.patch(batch(*patches))
    assert seen(demo_stack) == before


@pytest.mark.parametrize("time", ["once", "twice"])
def test_s5_checkpoint_file_as_plain_body_changes_nothing(
    demo_stack: Stack, demo_model: Path, time: str
) -> None:
    """The checkpoint file itself, 750 MB sent as it is, leaves everything as it was."""
    before = seen(demo_stack)
    for file in demo_model.glob("*.safetensors"):
        demo_stack.patch(file.read_bytes())
    assert seen(demo_stack) == before


def test_s1_one_expert_uploaded_leaves_all_others(demo_stack: Stack, weights: Weights) -> None:
    """One changed expert: its neighbours read back bit for bit, and no digest but its layer's changes."""
    version = demo_stack.version()
    before = demo_stack.digests()
    sent = {name: (t.float() * 1.1).to(t.dtype) for name, t in weights.expert(17, 2).items()}
    demo_stack.put_expert(17, 2, plain(sent))
    after = demo_stack.digests()
    changed = {name.split(":", 1)[1] for name in before if before[name] != after[name]}
    layer = "model.layers.17.block_sparse_moe.experts.routed_experts"
    assert changed == {f"{layer}.w13_weight", f"{layer}.w2_weight"}
    for layer in (16, 17, 18):
        for expert in range(weights.experts):
            got = load(demo_stack.call("GET", f"/v1/experts/{layer}/{expert}").content)
            wanted = sent if (layer, expert) == (17, 2) else weights.expert(layer, expert)
            assert all(same_bits(got[name], tensor) for name, tensor in wanted.items()), (layer, expert)
    for name, tensor in weights.tensors.items():
        if ".layers.17." in name and ".experts." not in name:
            got = load(demo_stack.call("GET", f"/v1/tensors/{name}").content)
            assert same_bits(got[name], tensor), name
    demo_stack.rollback(version)


def test_s4_accumulated_changes_equal_a_fresh_engine(
    demo_stack: Stack, weights: Weights, stacks: Stacks, root: Path
) -> None:
    """Changes of all kinds accumulate to what a fresh engine has; rollbacks bring all of it back."""
    base = demo_stack.version()
    marks = {base: seen(demo_stack)}
    for layer in range(0, weights.layers, 4):
        expert = layer % weights.experts
        for tensor in weights.expert(layer, expert).values():
            tensor.copy_((tensor.float() * 0.9).to(tensor.dtype))
        demo_stack.put_expert(layer, expert, plain(weights.expert(layer, expert)))
    marks[demo_stack.version()] = seen(demo_stack)
    for number, density in enumerate((0.0001, 0.01)):
        patches = [weights.sparse_like(name, density, number, torch.int32) for name in weights.tensors]
        demo_stack.patch(batch(*patches))
        weights.apply(patches)
    marks[demo_stack.version()] = seen(demo_stack)
    dense = [Dense(name, (weights.tensors[name].float() * 0.98).to(torch.bfloat16)) for name in DENSE]
    demo_stack.patch(batch(*dense))
    weights.apply(dense)
    final = demo_stack.version()
    marks[final] = seen(demo_stack)
    oracle = stacks.on(weights.save(root / "demo-final"))
    assert marks[final][1] == oracle.digests()
    assert marks[final][0] == answers(oracle)
    for version in (list(marks)[1], base, final, base):
        demo_stack.rollback(version)
        assert seen(demo_stack) == marks[version], f"version {version} did not come back"


DENSE = (
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.3.self_attn.q_proj.weight",
    "model.layers.3.self_attn.o_proj.weight",
    "model.layers.5.block_sparse_moe.gate.weight",
    "model.layers.5.block_sparse_moe.experts.1.w2.weight",
    "model.layers.29.input_layernorm.weight",
)


def chunks(names: list[str], size: int) -> list[list[str]]:
    return [names[start : start + size] for start in range(0, len(names), size)]
