"""Orientation: element (i, j) sent is element (i, j) read back and used, whatever the shapes hide."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from tests.e2e.bodies import Sparse, batch, plain
from tests.e2e.conftest import Stacks
from tests.e2e.stack import Stack
from tests.e2e.weights import Weights, same_bits

PROMPT = [10, 20, 30, 40, 50]


@pytest.fixture
def square_weights(square_model: Path) -> Weights:
    return Weights(square_model)


def numbered(shape: torch.Size) -> torch.Tensor:
    """A matrix in which no element equals its mirror image."""
    rows, columns = shape
    pattern = torch.arange(rows)[:, None] * 3 + torch.arange(columns)[None, :] % 7
    return (pattern.float() / pattern.numel()).to(torch.bfloat16)


def test_s1_square_expert_matrices_keep_their_orientation(square: Stack, square_weights: Weights) -> None:
    """With hidden = intermediate, an expert sent comes back untransposed, and so does a single element."""
    version = square.version()
    sent = {
        name: numbered(tensor.shape) if tensor.dim() == 2 else tensor
        for name, tensor in square_weights.expert(0, 3).items()
    }
    square.put_expert(0, 3, plain(sent))
    got = load(square.call("GET", "/v1/experts/0/3").content)
    for name, tensor in sent.items():
        assert same_bits(got[name], tensor), name
    name = "model.layers.0.mlp.experts.down_proj"
    experts, rows, columns = square_weights.tensors[name].shape
    expert, row, column = 6, 5, columns - 2
    position = torch.tensor([(expert * rows + row) * columns + column])
    value = torch.tensor([2.5], dtype=torch.bfloat16)
    square.patch(batch(Sparse(name, (experts, rows, columns), position, value)))
    whole = load(square.call("GET", f"/v1/tensors/{name}").content)[name]
    assert float(whole[expert, row, column]) == 2.5
    assert same_bits(whole[expert, column, row], square_weights.tensors[name][expert, column, row])
    square.rollback(version)


def test_square_model_equals_a_fresh_engine_after_change(
    square: Stack, square_weights: Weights, stacks: Stacks, root: Path
) -> None:
    """Every expert replaced by an asymmetric one: the engine answers as a fresh one on those weights."""
    for layer in range(square_weights.layers):
        for expert in range(square_weights.experts):
            tensors = square_weights.expert(layer, expert)
            for tensor in tensors.values():
                if tensor.dim() == 2:
                    scale = float(tensor.float().std()) * (1 + expert / 10)
                    tensor.copy_((tensor.float() + numbered(tensor.shape).float() * scale).to(torch.bfloat16))
            square.put_expert(layer, expert, plain(tensors))
    oracle = stacks.on(square_weights.save(root / "square-final"))
    assert square.digests() == oracle.digests()
    assert square.complete(PROMPT) == oracle.complete(PROMPT)
