"""Catalogues of small models in the styles that checkpoints come in."""

from loaders.catalogue import Catalogue
from schemas.dtypes import Dtype
from schemas.model import CheckpointTensor, ModelInfo, Treatment

HIDDEN, INTER = 4, 6


def tensor(
    name: str,
    *shape: int,
    dtype: Dtype = Dtype.BF16,
    reason: str | None = None,
    tied_to: str | None = None,
) -> CheckpointTensor:
    """A checkpoint tensor; with a `reason` it is unsupported."""
    treatment = Treatment.UNSUPPORTED if reason else Treatment.DIRECT
    return CheckpointTensor(
        name=name, dtype=dtype, shape=shape, treatment=treatment, reason=reason, tied_to=tied_to
    )


def catalogue(*tensors: CheckpointTensor, layers: int = 2, experts: int = 0) -> Catalogue:
    """A catalogue of these tensors."""
    info = ModelInfo(
        model="toy",
        architecture="Toy",
        dtype="bfloat16",
        quantization=None,
        layers=layers,
        experts=experts,
    )
    return Catalogue(tensors, info)


def gpt_oss(experts: int = 3) -> Catalogue:
    """Experts stacked in one tensor per kind and layer; tied output embedding."""
    found = [
        tensor("model.embed_tokens.weight", 10, HIDDEN),
        tensor("lm_head.weight", 10, HIDDEN, tied_to="model.embed_tokens.weight"),
        tensor("model.norm.weight", HIDDEN),
    ]
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        found += [
            tensor(prefix + "self_attn.q_proj.weight", HIDDEN, HIDDEN),
            tensor(prefix + "self_attn.sinks", 2),
            tensor(prefix + "mlp.router.weight", experts, HIDDEN),
            tensor(prefix + "mlp.experts.gate_up_proj", experts, HIDDEN, 2 * INTER),
            tensor(prefix + "mlp.experts.gate_up_proj_bias", experts, 2 * INTER),
            tensor(prefix + "mlp.experts.down_proj", experts, INTER, HIDDEN),
            tensor(prefix + "mlp.experts.down_proj_bias", experts, HIDDEN),
        ]
    return catalogue(*found, experts=experts)


def mixtral(experts: int = 4) -> Catalogue:
    """One tensor per expert, named w1, w2, w3."""
    found = [tensor("model.embed_tokens.weight", 10, HIDDEN)]
    for layer in range(2):
        prefix = f"model.layers.{layer}.block_sparse_moe."
        found.append(tensor(prefix + "gate.weight", experts, HIDDEN))
        for expert in range(experts):
            found += [
                tensor(f"{prefix}experts.{expert}.w1.weight", INTER, HIDDEN),
                tensor(f"{prefix}experts.{expert}.w2.weight", HIDDEN, INTER),
                tensor(f"{prefix}experts.{expert}.w3.weight", INTER, HIDDEN),
            ]
    return catalogue(*found, experts=experts)


def qwen3(experts: int = 4) -> Catalogue:
    """One tensor per expert from layer 1 on; layer 0 is dense; a shared expert beside the others."""
    found = [tensor("model.layers.0.mlp.gate_proj.weight", INTER, HIDDEN)]
    prefix = "model.layers.1.mlp."
    found.append(tensor(prefix + "shared_expert.gate_proj.weight", INTER, HIDDEN))
    for expert in range(experts):
        found += [
            tensor(f"{prefix}experts.{expert}.gate_proj.weight", INTER, HIDDEN),
            tensor(f"{prefix}experts.{expert}.up_proj.weight", INTER, HIDDEN),
            tensor(f"{prefix}experts.{expert}.down_proj.weight", HIDDEN, INTER),
        ]
    return catalogue(*found, experts=experts)
