"""The bias of an expert's second matrix on two ranks: their parts are added up, so only one has it."""

import torch
from blake3 import blake3

from tests.e2e.bodies import Dense, batch, plain
from tests.e2e.stack import Stack
from tests.e2e.weights import Weights, altered


def check_the_first_rank_alone_has_it(stack: Stack, weights: Weights) -> None:
    """Through experts, patches and rollbacks the second rank's bias is zero and the first's whole."""
    version = stack.version()
    names = [f"model.layers.{layer}.mlp.experts.down_proj_bias" for layer in range(weights.layers)]
    own = [weights.tensors[name] for name in names]
    _check(stack, own)
    expert = weights.expert(0, 3)
    new = altered(expert["down_proj_bias"], torch.Generator().manual_seed(1))
    changed = [bias.clone() for bias in own]
    changed[0][3] = new
    for name in ("down_proj_bias", "w2_bias"):
        first, second = stack.put_expert(0, 3, plain({name: new}), partial="true")["ranks"]
        assert (first["tensors"], first["elements"]) == (1, new.numel())
        assert (second["tensors"], second["elements"], second["nbytes"]) == (0, 0, 0)
        _check(stack, changed)
        stack.rollback(version)
        _check(stack, own)
    stack.put_expert(0, 3, plain(expert | {"down_proj_bias": new}))
    _check(stack, changed)
    dense = [Dense(name, bias * 2) for name, bias in zip(names, changed, strict=True)]
    stack.patch(batch(*dense))
    _check(stack, [patch.values for patch in dense])
    sparse = [weights.sparse_like(name, 0.1, 3, torch.int64) for name in names]
    stack.patch(batch(*sparse))
    for patch, one in zip(sparse, dense, strict=True):
        one.values.view(-1)[patch.indices] = patch.values
    _check(stack, [patch.values for patch in dense])
    stack.rollback(version)
    _check(stack, own)


def _check(stack: Stack, biases: list[torch.Tensor]) -> None:
    """Both ranks' digests are those of these biases and of zeros."""
    found = {name: digest for name, digest in stack.digests().items() if name.endswith("w2_bias")}
    for rank, wanted in enumerate((biases, [torch.zeros_like(bias) for bias in biases])):
        held = [digest for name, digest in sorted(found.items()) if name.startswith(f"{rank}:")]
        assert held == [blake3(bytes(bias.view(torch.uint8).flatten())).hexdigest() for bias in wanted]
