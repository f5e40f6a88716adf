"""An MXFP4 gpt-oss behind `graft serve`: packed experts sent, changed, halved, misshapen and taken back.

vLLM's CPU build has no kernel for them; a reference in plain torch stands in, which repacks as real ones do.
"""

from pathlib import Path

import httpx
import pytest
import torch

from tests.e2e.asking import answers, read_expert, read_tensor, same, seen
from tests.e2e.bodies import Dense, Sparse, batch, plain
from tests.e2e.conftest import Stacks
from tests.e2e.packed import PACKED, STREAMING, make_model, reference, streamed
from tests.e2e.stack import SAFETENSORS, Stack
from tests.e2e.weights import Weights, altered, same_bits

HALVES = [
    (f"{matrix}_proj_{one}", f"{matrix}_proj_{other}")
    for matrix in ("gate_up", "down")
    for one, other in (("blocks", "scales"), ("scales", "blocks"))
]


@pytest.fixture(scope="module")
def variables(root: Path) -> dict[str, str]:
    return reference(root / "reference")


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    return make_model(root / "mxfp4")


@pytest.fixture(scope="module")
def weights(model: Path) -> Weights:
    """What the engine is thought to have."""
    return Weights(model)


@pytest.fixture
def stack(stacks: Stacks, model: Path, variables: dict[str, str]) -> Stack:
    return stacks.on(model, **variables)


def another(weights: Weights, layer: int, expert: int, seed: int) -> dict[str, torch.Tensor]:
    """Other weights for an expert, each byte and number of it changed."""
    generator = torch.Generator().manual_seed(seed)
    return {name: altered(tensor, generator) for name, tensor in weights.expert(layer, expert).items()}


def attempt(stack: Stack, tensors: dict[str, torch.Tensor], **query: str) -> httpx.Response:
    """Send them as expert 2 of layer 0."""
    return stack.call("PUT", "/v1/experts/0/2", content=plain(tensors), headers=SAFETENSORS, params=query)


def refused(answer: httpx.Response, code: str) -> list[dict[str, str]]:
    """The faults of a refusal with that code."""
    assert (answer.status_code, answer.json()["code"]) == (422, code), answer.text
    faults: list[dict[str, str]] = answer.json()["errors"]
    return faults


def test_every_tensor_can_be_updated(stack: Stack, weights: Weights) -> None:
    """The engine lists each checkpoint tensor, packed ones as bytes, and refuses none."""
    listed = {item["name"]: item for item in stack.json("GET", "/v1/model/tensors?limit=1000")["tensors"]}
    assert listed.keys() == weights.tensors.keys()
    for name, tensor in weights.tensors.items():
        assert listed[name]["treatment"] != "unsupported", listed[name]["reason"]
        assert listed[name]["shape"] == list(tensor.shape)
        assert (listed[name]["dtype"] == "U8") == name.endswith(("_blocks", "_scales"))
        assert same_bits(read_tensor(stack, name), tensor), name


@pytest.mark.parametrize("time", ["once", "twice", "thrice"])
def test_s1_every_expert_with_its_own_weights_changes_nothing(
    stack: Stack, weights: Weights, time: str
) -> None:
    """Every expert sent alone, unchanged, leaves tokens, log-probabilities and digests, again and again."""
    before = seen(stack)
    for layer in range(weights.layers):
        for expert in range(weights.experts):
            receipt = stack.put_expert(layer, expert, plain(weights.expert(layer, expert)))
            assert (receipt["experts"], receipt["tensors"]) == (1, 6)
            assert receipt["nbytes"]["written"] > 0
    assert seen(stack) == before


@pytest.mark.parametrize("names", [STREAMING, PACKED], ids=["weight", "packed"])
def test_s3_streaming_names_are_the_same_weights(
    stack: Stack, weights: Weights, names: dict[str, str]
) -> None:
    """Own and changed weights under vLLM's names, short and in full, are those under the checkpoint's."""
    version, before = stack.version(), seen(stack)
    for layer in range(weights.layers):
        for expert in range(weights.experts):
            stack.put_expert(layer, expert, plain(streamed(weights.expert(layer, expert), names)))
    assert seen(stack) == before
    new = another(weights, 1, 5, seed=1)
    stack.put_expert(1, 5, plain(new))
    changed = seen(stack)
    assert changed[0] != before[0]
    prefix = "model.layers.1.mlp.experts."
    short = streamed(new, names)
    full = {f"{prefix}5.{name}": tensor for name, tensor in short.items()}
    inserted = {f"{prefix}routed_experts.5.{name}": tensor for name, tensor in short.items()}
    for send in (
        lambda: stack.put_expert(1, 5, plain(short)),
        lambda: stack.put_expert(1, 5, plain(full)),
        lambda: stack.patch(plain(inserted)),
        lambda: stack.patch(batch(*(Dense(name, tensor) for name, tensor in full.items()))),
    ):
        stack.rollback(version)
        send()
        assert seen(stack) == changed
    stack.rollback(version)
    assert seen(stack) == before


def test_s1_one_expert_uploaded_leaves_all_others(stack: Stack, weights: Weights) -> None:
    """A changed packed expert reads back as sent, all others and all other tensors as before."""
    version = stack.version()
    sent = another(weights, 1, 3, seed=2)
    stack.put_expert(1, 3, plain(sent))
    for layer in range(weights.layers):
        for expert in range(weights.experts):
            wanted = sent if (layer, expert) == (1, 3) else weights.expert(layer, expert)
            assert same(read_expert(stack, layer, expert), wanted), (layer, expert)
    for name, tensor in weights.tensors.items():
        if ".experts." not in name:
            assert same_bits(read_tensor(stack, name), tensor), name
    stack.rollback(version)


@pytest.mark.parametrize("names", [None, STREAMING, PACKED], ids=["checkpoint", "weight", "packed"])
@pytest.mark.parametrize(("sent", "missing"), HALVES)
def test_s1_a_weight_or_scale_alone_needs_partial(
    stack: Stack, weights: Weights, sent: str, missing: str, names: dict[str, str] | None
) -> None:
    """Half of a packed weight is refused by its code, both named; with `partial` it is that half alone."""
    version = stack.version()
    tensors = weights.expert(0, 2)
    half = another(weights, 0, 2, seed=3)[sent]
    name = names[sent] if names else sent
    most = {n: t for n, t in tensors.items() if n != missing} | {sent: half}
    if names:
        most = streamed(most, names)
    [fault] = refused(attempt(stack, most), "missing_tensor")
    assert (fault["name"], fault["half"]) == (missing, name)
    assert missing in fault["detail"] and name in fault["detail"]
    first, *others = refused(attempt(stack, {name: most[name]}), "missing_tensor")
    assert (first["name"], first["half"], len(others)) == (missing, name, 4)
    assert stack.version() == version
    assert same(read_expert(stack, 0, 2), tensors)
    assert attempt(stack, {name: most[name]}, partial="true").status_code == 200
    assert same(read_expert(stack, 0, 2), tensors | {sent: half})
    stack.rollback(version)


def test_s5_halves_sent_apart_are_the_whole(stack: Stack, weights: Weights) -> None:
    """A weight now and its scale in a later version, in either order, end where both at once do."""
    version = stack.version()
    new = another(weights, 0, 2, seed=4)
    stack.put_expert(0, 2, plain(new))
    whole = seen(stack)
    for order in (list(new), list(reversed(new))):
        stack.rollback(version)
        for name in order:
            stack.put_expert(0, 2, plain({name: new[name]}), partial="true")
        assert seen(stack) == whole
    stack.rollback(version)


def test_s1_scalars_and_trailing_ones(stack: Stack, weights: Weights) -> None:
    """Trailing ones anywhere, and one byte as a scalar, are taken for what they are."""
    version, before = stack.version(), seen(stack)
    longer = {name: tensor[..., None, None] for name, tensor in weights.expert(0, 2).items()}
    assert attempt(stack, longer).status_code == 200
    assert seen(stack) == before
    name = "model.layers.0.mlp.experts.2.w13_weight_scale"
    wanted = weights.expert(0, 2)
    scales = wanted["gate_up_proj_scales"].clone()
    for position, shape in ((0, ()), (3, (1,)), (scales.numel() - 1, (1, 1))):
        value = scales.view(-1)[position] ^ 1
        scales.view(-1)[position] = value
        stack.patch(
            batch(Sparse(name, (*scales.shape, 1), torch.tensor([position]), value.clone().view(shape)))
        )
    assert same(read_expert(stack, 0, 2), wanted | {"gate_up_proj_scales": scales})
    stack.rollback(version)


def test_s1_other_forms_are_refused(stack: Stack, weights: Weights) -> None:
    """All flat, unpacked, transposed, the whole stack, another dtype: refused, and nothing is changed."""
    version = stack.version()
    own = weights.expert(0, 2)
    blocks, scales = own["down_proj_blocks"], own["down_proj_scales"]
    for name, wrong in (
        ("down_proj_blocks", blocks.flatten()),
        ("down_proj_blocks", blocks.flatten(0, 1)),
        ("down_proj_blocks", blocks.flatten(1).repeat(1, 2)),
        ("down_proj_blocks", blocks.flatten(1)[:, ::2]),
        ("down_proj_blocks", blocks.flatten(1).view(-1, 128)),
        ("down_proj_blocks", blocks.transpose(0, 1)),
        ("down_proj_blocks", weights.tensors["model.layers.0.mlp.experts.down_proj_blocks"]),
        ("down_proj_scales", scales.flatten()),
        ("down_proj_scales", scales.t()),
        ("down_proj_bias", own["down_proj_bias"][None]),
    ):
        [fault] = refused(attempt(stack, own | {name: wrong}), "wrong_shape")
        assert fault["name"] == name
    [fault] = refused(attempt(stack, own | {"down_proj_scales": scales.view(torch.int8)}), "wrong_dtype")
    nan = scales.clone()
    nan[5, 1] = 255
    [fault] = refused(attempt(stack, own | {"down_proj_scales": nan}), "nonfinite")
    assert (fault["name"], fault["position"]) == ("down_proj_scales", 5 * scales.shape[1] + 1)
    both = own | {"w2_weight": blocks.flatten(1)}
    refused(attempt(stack, both), "duplicate_tensor")
    assert stack.version() == version
    assert same(read_expert(stack, 0, 2), own)


def test_s4_one_byte_patched_changes_one_byte(stack: Stack, weights: Weights) -> None:
    """A position in a packed tensor is that of a byte: exactly it differs, at both ends and in between."""
    version = stack.version()
    for name, tensor in weights.tensors.items():
        if tensor.dtype is not torch.uint8:
            continue
        wanted = tensor.clone()
        for position in (0, tensor.numel() // 2 + 1, tensor.numel() - 1):
            value = wanted.view(-1)[position] ^ 3
            patch = Sparse(name, tuple(tensor.shape), torch.tensor([position]), value.view(1))
            assert stack.patch(batch(patch))["uploads"][0]["elements"] == 1
            wanted.view(-1)[position] = value
            assert same_bits(read_tensor(stack, name), wanted), (name, position)
        bad = Sparse(name, tuple(tensor.shape), torch.tensor([tensor.numel()]), value.view(1))
        answer = stack.call("POST", "/v1/patches", content=batch(bad), headers=SAFETENSORS)
        refused(answer, "bad_index")
    stack.rollback(version)


def test_s5_changes_of_all_kinds_equal_a_fresh_engine(
    stack: Stack, weights: Weights, stacks: Stacks, root: Path, variables: dict[str, str]
) -> None:
    """Experts, sparse, dense and mixed patches end where an engine on such a checkpoint starts.

    Rolled back to any of the versions, everything comes back bit for bit.
    """
    marks = {stack.version(): seen(stack)}
    for number, (layer, expert) in enumerate(((0, 0), (0, 7), (1, 4))):
        new = another(weights, layer, expert, seed=10 + number)
        stack.put_expert(layer, expert, plain(streamed(new, (STREAMING, PACKED)[number % 2])))
        for name, tensor in weights.expert(layer, expert).items():
            tensor.copy_(new[name])
    marks[stack.version()] = seen(stack)
    for number, density in enumerate((0.0001, 0.01, 0.3)):
        patches = [
            weights.sparse_like(name, density, number, (torch.int32, torch.int64)[number % 2])
            for name in weights.tensors
        ]
        stack.patch(batch(*patches))
        weights.apply(patches)
    marks[stack.version()] = seen(stack)
    generator = torch.Generator().manual_seed(8)
    packed = [name for name, tensor in weights.tensors.items() if tensor.dtype is torch.uint8]
    for name in packed[::2]:
        mixed = [
            weights.sparse_like(name, 0.2, 1, torch.int64),
            Dense(name, altered(weights.tensors[name], generator)),
            weights.sparse_like(name, 0.02, 2, torch.int32),
        ]
        stack.patch(batch(*mixed))
        weights.apply(mixed)
    final = stack.version()
    marks[final] = seen(stack)
    base, *middle = list(marks)[:-1]
    assert len({str(mark) for mark in marks.values()}) == len(marks)
    for version in (base, *middle, base, final):
        assert stack.rollback(version)["restores"] == str(version)
        assert seen(stack) == marks[version], f"version {version} did not come back"
    assert all(same_bits(read_tensor(stack, name), tensor) for name, tensor in weights.tensors.items())
    stacks.close()
    oracle = stacks.on(weights.save(root / "mxfp4-final"), **variables)
    assert marks[final][1] == oracle.digests()
    assert marks[final][0] == answers(oracle)
