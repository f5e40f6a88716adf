"""Toy checkpoints of many families, made by transformers from a config alone, with seeded weights.

transformers writes them under the names that published checkpoints have, so each family's
own naming, stacking and tying is met.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from loaders.engine.model_folder import new_folder
from loaders.engine.toy_model import EXPERTS, HEAD_DIM, HEADS, KV_HEADS, LAYERS, TOP_K, VOCAB, byte_tokenizer

HIDDEN, INTERMEDIATE = 64, 128

_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
_LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K}
_WITHOUT_HEAD_DIM = {name: value for name, value in _COMMON.items() if name != "head_dim"}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ("GptOssConfig", _COMMON | _LOCAL_EXPERTS | {"sliding_window": 32}),
    "mixtral": ("MixtralConfig", _COMMON | _LOCAL_EXPERTS),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        _COMMON | _EXPERTS | {"moe_intermediate_size": INTERMEDIATE, "norm_topk_prob": True},
    ),
    "olmoe": ("OlmoeConfig", _WITHOUT_HEAD_DIM | _EXPERTS | {"hidden_size": 128}),
    "granite-moe": ("GraniteMoeConfig", _WITHOUT_HEAD_DIM | _LOCAL_EXPERTS | {"hidden_size": 128}),
    "deepseek-v2": (
        "DeepseekV2Config",
        _WITHOUT_HEAD_DIM
        | {
            "num_key_value_heads": HEADS,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "n_shared_experts": 1,
            "moe_intermediate_size": INTERMEDIATE,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,  # with 64 of rope: the one head size of vLLM's MLA on CPU
            "q_lora_rank": 48,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "llama": ("LlamaConfig", _COMMON),
    "llama-tied": ("LlamaConfig", _COMMON | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", _WITHOUT_HEAD_DIM | {"hidden_size": 128}),
}
"""Name → class of the config, and what it is made with."""


def make_family(family: str, path: Path, *, dtype: str = "bfloat16", seed: int = 0, **other: Any) -> Path:
    """Write a toy checkpoint of the family; `other` members of its config go before those of the table.

    Raises FileExistsError when `path` exists.
    """
    kind, members = FAMILIES[family]
    tokenizer = byte_tokenizer()
    ids = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config: PreTrainedConfig = getattr(transformers, kind)(**(members | ids | other), dtype=dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    _draw(model, seed)
    with new_folder(path) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return path


def _draw(model: torch.nn.Module, seed: int) -> None:
    """Every parameter is drawn so that each part of the model moves the greedy tokens."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * _spread(name, parameter) + (1.0 if _is_norm(name, parameter) else 0.0))


def _is_norm(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim == 1 and name.endswith("weight")


def _spread(name: str, parameter: torch.Tensor) -> float:
    if _is_norm(name, parameter):
        return 0.1
    if "embed_tokens" in name:
        return 1.0
    if name.endswith("bias") or parameter.ndim == 1:
        return 0.3
    return (3.0 if "lm_head" in name else 1.5) / min(parameter.shape[-2:]) ** 0.5


def quantise_w8a8(path: Path, out: Path, *, symmetric: bool = False) -> Path:
    """A copy with int8 linears in compressed-tensors' format: scales per channel and per token.

    Asymmetric activations make vLLM derive `azp_adj` from the weight.
    """
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": symmetric}
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "dynamic": False, "symmetric": True}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        },
    }

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("proj.weight")]:
            weight = tensors[name].float()
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors[name] = (weight / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale.to(torch.bfloat16)

    change(path, out, quantise)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return out


def change(path: Path, out: Path, alter: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of the folder with tensors altered in place, in one file."""
    with new_folder(out) as folder:
        for file in path.iterdir():
            if file.is_file() and "safetensors" not in file.name:
                (folder / file.name).write_bytes(file.read_bytes())
        tensors = tensors_of(path)
        alter(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return out


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder."""
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


def quantise_mxfp4(path: Path, out: Path, *, seed: int = 7) -> Path:
    """A copy of a gpt-oss with its experts in MXFP4: seeded codes in blocks of 32 with an exponent each."""
    generator = torch.Generator().manual_seed(seed)

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            experts, inputs, outputs = tensors.pop(name).shape
            blocks = (experts, outputs, inputs // 32)
            tensors[f"{name}_blocks"] = torch.randint(
                256, (*blocks, 16), generator=generator, dtype=torch.uint8
            )
            tensors[f"{name}_scales"] = torch.randint(
                122, 126, blocks, generator=generator, dtype=torch.uint8
            )

    change(path, out, quantise)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return out


def add_adapter(path: Path, *, rank: int = 8) -> Path:
    """Put a seeded LoRA adapter for the attention and the MLP into the folder."""
    generator = torch.Generator().manual_seed(9)
    tensors = {}
    for name, weight in tensors_of(path).items():
        if name.endswith("proj.weight"):
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            for part, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                noise = torch.randn(shape, generator=generator) * 0.3
                tensors[f"{prefix}.lora_{part}.weight"] = noise.to(torch.bfloat16)
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": targets,
        "bias": "none",
    }
    (path / "adapter").mkdir()
    save_file(tensors, path / "adapter" / "adapter_model.safetensors")
    (path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    return path


def retie(path: Path, out: Path) -> Path:
    """A copy that holds an output head beside the embedding and equal to it, though the config says tied."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    return change(path, out, add)


def shard(path: Path, parts: int = 2) -> None:
    """Spread the folder's one file over several with an index."""
    tensors = tensors_of(path)
    (path / "model.safetensors").unlink()
    weight_map = {}
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        chosen = {name: tensors[name] for name in sorted(tensors)[part::parts]}
        save_file(chosen, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
