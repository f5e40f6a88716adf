"""Experts in other formats than MXFP4 behind `graft serve`: sent, renamed, changed, and taken back.

Kernels that vLLM's CPU build lacks are references in plain torch.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.e2e.asking import answers, read_expert, read_tensor, seen
from tests.e2e.bodies import Sparse, batch, plain
from tests.e2e.conftest import Stacks
from tests.e2e.packed import reference
from tests.e2e.stack import SAFETENSORS, Stack
from tests.e2e.weights import Weights, same_bits
from tests.families.models import make_family
from tests.families.quantised import FORMATS, quantise_experts, quantise_quark

ALWAYS = ("W4A16 with zero points", "Quark MXFP4")
"""What `make test` tries; the others are `long`."""
NAMES = (*FORMATS, "Quark FP8", "Quark MXFP4")
SHARING = ("W4A16", "W4A16 with zero points", "FP8 by tensors")
"""Formats in which tensors of a checkpoint are loaded into the same elements: scales per tensor, shapes."""
UNLOADED = ("GPTQ",)
"""Formats of which vLLM leaves tensors out."""
CODES = ("weight_packed", "qweight", "weight")
"""Ends of the names of what holds the numbers of a matrix."""


def params(names: Iterable[str]) -> list[Any]:
    """Formats as parameters."""
    return [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.long) for name in names]


@pytest.fixture(scope="module", params=params(NAMES))
def weights(request: pytest.FixtureRequest, root: Path) -> Weights:
    """What the engine is thought to have, in each of the formats."""
    name: str = request.param
    folder = root / name.replace(" ", "-")
    unquantised = root / f"{folder.name}-plain"
    if name.startswith("Quark "):
        made = quantise_quark(make_family("gpt-oss", unquantised), folder, name.removeprefix("Quark "))
    else:
        made = quantise_experts(make_family("qwen3-moe", unquantised), folder, name)
    return Weights(made)


@pytest.fixture(scope="module")
def variables(root: Path) -> dict[str, str]:
    return reference(root / "formats-reference")


@pytest.fixture
def stack(stacks: Stacks, weights: Weights, variables: dict[str, str]) -> Stack:
    return stacks.on(weights.model, **variables)


def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The expert with other codes and other scales beside them."""
    found = {}
    for name, tensor in tensors.items():
        last = name.rpartition(".")[2]
        if last in CODES and not tensor.is_floating_point():
            found[name] = tensor ^ 0x33
        elif last in ("weight_scale", "weight_scale_inv", "scales") and tensor.is_floating_point():
            found[name] = (tensor.float() * 0.75).to(tensor.dtype)
        elif last == "weight":
            found[name] = (tensor.float() * 0.5).to(tensor.dtype)
        else:
            found[name] = tensor.clone()
    return found


def refused(answer: httpx.Response, code: str) -> dict[str, Any]:
    """The problem document of a refusal with that code."""
    assert (answer.status_code, answer.json()["code"]) == (422, code), answer.text
    document: dict[str, Any] = answer.json()
    return document


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A Quark expert's tensors under the names that vLLM streams."""
    short = {"gate_up_proj.": "w13_", "down_proj.": "w2_"}
    return {
        next(new + name.removeprefix(old) for old, new in short.items() if name.startswith(old)): tensor
        for name, tensor in tensors.items()
    }


def test_s1_every_expert_with_its_own_weights_changes_nothing(stack: Stack, weights: Weights) -> None:
    """All experts, one by one in one transaction: the same tokens, log-probabilities and digests."""
    before = seen(stack)
    with stack.transaction() as transaction:
        for layer in range(weights.layers):
            for expert in range(weights.experts):
                own = weights.expert(layer, expert)
                upload = transaction.expert(layer, expert, plain(own))
                assert upload["tensors"] == len([n for n in own if not n.endswith(".g_idx")])
        assert transaction.commit().status_code == 200
    assert seen(stack) == before
    listed = {item["name"]: item for item in stack.json("GET", "/v1/model/tensors?limit=1000")["tensors"]}
    for expert in (0, weights.experts - 1):
        own, read = weights.expert(0, expert), read_expert(stack, 0, expert)
        assert read.keys() == own.keys()
        for name, tensor in own.items():
            if listed[f"model.layers.0.mlp.experts.{expert}.{name}"]["lossless"]:
                assert same_bits(read[name], tensor), name


def test_s1_a_weight_without_its_scale_is_refused(stack: Stack, weights: Weights) -> None:
    """Each part that gives the codes their meaning is missed by name; what is not loaded is not."""
    own = weights.expert(0, 1)
    for missing in own:
        body = plain({name: tensor for name, tensor in own.items() if name != missing})
        with stack.transaction() as transaction:
            path = f"/v1/transactions/{transaction.id}/experts/0/1"
            answer = stack.call("PUT", path, content=body, headers=SAFETENSORS)
            stack.json("DELETE", f"/v1/transactions/{transaction.id}")
        if missing.endswith(".g_idx"):
            assert answer.status_code == 200
            continue
        (fault,) = refused(answer, "missing_tensor")["errors"]
        part = not missing.endswith((".bias", ".input_scale", ".input_global_scale", ".weight_shape"))
        assert fault["name"] == missing and ("half" in fault) == part


def test_s3_old_and_new_names_are_the_same_weights(stack: Stack, weights: Weights) -> None:
    """Short, full, with `routed_experts`, and for Quark as vLLM streams them: one and the same change."""
    version, before = stack.version(), seen(stack)
    new = changed(weights.expert(1, 5))
    prefix = "model.layers.1.mlp.experts."
    namings = [new] + ([renamed(new)] if "gate_up_proj.weight" in new else [])
    stack.put_expert(1, 5, plain(new))
    wanted = seen(stack)
    assert wanted[1] != before[1] and wanted[0] != before[0]
    for tensors in namings:
        full = {f"{prefix}5.{name}": tensor for name, tensor in tensors.items()}
        inserted = {f"{prefix}routed_experts.5.{name}": tensor for name, tensor in tensors.items()}
        for send, body in (
            (lambda body: stack.put_expert(1, 5, body), tensors),
            (lambda body: stack.put_expert(1, 5, body), inserted),
            (stack.patch, full),
            (stack.patch, inserted),
        ):
            stack.rollback(version)
            send(plain(body))
            assert stack.digests() == wanted[1]
    stack.rollback(version)
    assert seen(stack) == before


def sharing(stack: Stack) -> list[dict[str, Any]]:
    """Tensors of experts that others share elements with."""
    tensors: list[dict[str, Any]] = stack.json("GET", "/v1/model/tensors?limit=1000")["tensors"]
    return [one for one in tensors if one["tied_to"] and one["dtype"] in ("F32", "I64")]


def unloaded(weights: Weights) -> list[str]:
    """Tensors that vLLM does not load."""
    return [name for name in weights.tensors if name.endswith(".g_idx")]


@pytest.mark.parametrize(
    "weights", params(n for n in NAMES if n not in SHARING), indirect=True, scope="module"
)
def test_no_tensors_share_elements(stack: Stack, weights: Weights) -> None:
    """In these formats every tensor has elements of its own."""
    assert sharing(stack) == []


@pytest.mark.parametrize("weights", params(SHARING), indirect=True, scope="module")
def test_tensors_that_share_elements_are_sent_alike(stack: Stack, weights: Weights) -> None:
    """One of them alone is refused when the transaction is prepared, both named, and nothing stays."""
    tied = sharing(stack)
    name, other = tied[0]["name"], tied[0]["tied_to"]
    version, digests = stack.version(), stack.digests()
    value = weights.tensors[name] * 2
    answer = stack.call("POST", "/v1/patches", content=plain({name: value}), headers=SAFETENSORS)
    document = refused(answer, "tied_tensor")
    assert name in document["detail"] and other in document["detail"]
    unequal = plain({name: value, other: value + 1})
    document = refused(stack.call("POST", "/v1/patches", content=unequal, headers=SAFETENSORS), "tied_tensor")
    assert name in document["detail"] and other in document["detail"]
    assert (stack.version(), stack.digests(), stack.staged_files()) == (version, digests, [])


def test_values_that_are_no_numbers_are_refused(stack: Stack, weights: Weights) -> None:
    """NaN in a scale or a float8 weight is refused; packed codes may be any bits."""
    version = stack.version()
    for name, tensor in weights.expert(0, 2).items():
        full = f"model.layers.0.mlp.experts.2.{name}"
        if tensor.is_floating_point():
            bad = tensor.clone()
            bad.view(-1)[-1] = float("nan")
            answer = stack.call("POST", "/v1/patches", content=plain({full: bad}), headers=SAFETENSORS)
            (fault,) = refused(answer, "nonfinite")["errors"]
            assert (fault["name"], fault["position"]) == (full, tensor.numel() - 1)
        elif name.endswith(("weight_packed", "qweight", "qzeros", "weight_zero_point")):
            stack.patch(plain({full: ~torch.zeros_like(tensor)}))
    stack.rollback(version)


def test_s5_the_whole_file_thrice_changes_nothing(stack: Stack, weights: Weights) -> None:
    """The checkpoint's file sent as it lies on disk, and a reload: the same digests, tokens, logprobs."""
    before = seen(stack)
    content = (weights.model / "model.safetensors").read_bytes()
    for _ in range(3):
        stack.patch(content)
        assert stack.digests() == before[1]
    stack.json("POST", "/v1/reload", json={})
    assert seen(stack) == before


@pytest.mark.parametrize("weights", params(UNLOADED), indirect=True, scope="module")
def test_what_is_not_loaded_stays_as_in_the_checkpoint(stack: Stack, weights: Weights) -> None:
    """It can be read and sent back, alone too; other values are refused with the reason."""
    name, digests = unloaded(weights)[0], stack.digests()
    own = weights.tensors[name]
    assert same_bits(read_tensor(stack, name), own)
    stack.patch(plain({name: own}))
    assert stack.digests() == digests
    version = stack.version()
    one = Sparse(name, tuple(own.shape), torch.tensor([1]), own[1:2])
    for body in (plain({name: own + 1}), batch(one)):
        answer = stack.call("POST", "/v1/patches", content=body, headers=SAFETENSORS)
        (fault,) = refused(answer, "tensor_unsupported")["errors"]
        assert "not loaded" in fault["detail"]
    assert stack.version() == version


@pytest.mark.long  # a second engine
def test_s5_changes_equal_a_fresh_engine_and_come_back(
    stack: Stack, weights: Weights, stacks: Stacks, root: Path, variables: dict[str, str]
) -> None:
    """A changed expert and a sparse patch of codes: as an engine on such a checkpoint; and back, bitwise."""
    version, before = stack.version(), seen(stack)
    new = changed(weights.expert(1, 3))
    stack.put_expert(1, 3, plain(new))
    for name, tensor in weights.expert(1, 3).items():
        tensor.copy_(new[name])
    patches = []
    for name, tensor in weights.tensors.items():
        if ".experts.6." not in name or not name.endswith(CODES):
            continue
        bits = tensor.view(torch.uint8) if tensor.is_floating_point() else tensor
        indices = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(1))[:50]
        # A sign and a low bit of a code; a float8 stays a number.
        values = (bits.view(-1)[indices] ^ (0x80 if tensor.is_floating_point() else 9)).view(tensor.dtype)
        patches.append(Sparse(name, tuple(tensor.shape), indices, values))
        bits.view(-1)[indices] = values.view(bits.dtype)
    assert patches
    stack.patch(batch(*patches))
    after = seen(stack)
    assert after[0] != before[0]
    final = stack.version()
    stack.rollback(version)
    assert seen(stack) == before
    stack.rollback(final)
    assert seen(stack) == after
    stacks.close()
    oracle = stacks.on(weights.save(root / f"{weights.model.name}-final"), **variables)
    assert after == (answers(oracle), oracle.digests())
    stacks.close()
