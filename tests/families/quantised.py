"""Checkpoints with experts in a quantised format: seeded codes and scales under published names.

Only experts are quantised: what is tried is how they are loaded, repacked and changed.
Codes are drawn, not rounded from weights: a toy means nothing, and every bit pattern is met.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from loaders.engine.toy_model import LAYERS
from tests.families.models import change

Draw = Callable[["Source", int, int], dict[str, torch.Tensor]]
"""Makes the tensors of a projection [outputs, inputs], by what follows its name."""

PROJECTION = re.compile(r"(.*\.experts\.\d+\.\w+)\.weight$")
GROUP = 32
NOT_EXPERTS = ["re:.*self_attn.*", "re:.*gate$", "re:.*router$", "lm_head"]


class Source:
    """Seeded draws; scales are such that weights come out as large as the family's own."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def bits(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Any bit pattern."""
        nbytes = torch.empty(shape, dtype=dtype).nbytes
        drawn = torch.randint(256, (nbytes,), generator=self._generator, dtype=torch.uint8)
        return drawn.view(dtype).view(shape)

    def scales(self, typical: float, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Around `typical`, from half to one and a half of it."""
        return (typical * (0.5 + torch.rand(shape, generator=self._generator))).to(dtype)

    def float8(self, *shape: int) -> torch.Tensor:
        """Float8 values around one."""
        return torch.randn(shape, generator=self._generator).clamp(-3, 3).to(torch.float8_e4m3fn)


def _nvfp4(source: Source, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": source.bits(torch.uint8, outputs, inputs // 2),
        "weight_scale": source.scales(32, outputs, inputs // 16, dtype=torch.float8_e4m3fn),
        "weight_global_scale": source.scales(600, 1),
        "input_global_scale": source.scales(50, 1),
    }


def _int4(source: Source, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": source.bits(torch.int32, outputs, inputs // 8),
        "weight_scale": source.scales(0.04, outputs, inputs // GROUP, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([outputs, inputs]),
    }


def _int4_with_zeros(source: Source, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    zeros = source.bits(torch.int32, outputs // 8, inputs // GROUP)
    return _int4(source, outputs, inputs) | {"weight_zero_point": zeros}


def _fp8_rows(source: Source, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    return {"weight": source.float8(outputs, inputs), "weight_scale": source.scales(0.2, outputs, 1)}


def _fp8_one(source: Source, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    return {
        "weight": source.float8(outputs, inputs),
        "weight_scale": source.scales(0.2, 1),
        "input_scale": torch.tensor([0.1]),  # vLLM refuses those of gate and up if they differ
    }


def _fp8_blocks(source: Source, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    scales = source.scales(0.2, outputs // GROUP, inputs // GROUP)
    return {"weight": source.float8(outputs, inputs), "weight_scale_inv": scales}


def _int8(source: Source, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    return {
        "weight": source.bits(torch.int8, outputs, inputs),
        "weight_scale": source.scales(0.003, outputs, 1),
    }


def _awq(source: Source, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    return {
        "qweight": source.bits(torch.int32, inputs, outputs // 8),
        "qzeros": source.bits(torch.int32, inputs // GROUP, outputs // 8),
        "scales": source.scales(0.04, inputs // GROUP, outputs, dtype=torch.float16),
    }


def _gptq(source: Source, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    return _awq(source, outputs, inputs) | {
        "qweight": source.bits(torch.int32, inputs // 8, outputs),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }


def _compressed(kind: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    """compressed-tensors' description of the checkpoint."""
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False} | weights,
        "format": kind,
    }
    group["input_activations"] = activations and {"symmetric": True} | activations
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "ignore": NOT_EXPERTS,
        "config_groups": {"group_0": group},
    }


_FOUR = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_FLOAT8 = {"num_bits": 8, "type": "float"}
_INT8 = {"num_bits": 8, "type": "int"}

FORMATS: dict[str, tuple[Draw, dict[str, Any]]] = {
    "NVFP4": (_nvfp4, _compressed("nvfp4-pack-quantized", _NVFP4, _NVFP4 | {"dynamic": "local"})),
    "W4A16": (_int4, _compressed("pack-quantized", _FOUR, None)),
    "W4A16 with zero points": (
        _int4_with_zeros,
        _compressed("pack-quantized", _FOUR | {"symmetric": False}, None),
    ),
    "FP8 by rows": (
        _fp8_rows,
        _compressed(
            "float-quantized",
            _FLOAT8 | {"strategy": "channel"},
            _FLOAT8 | {"strategy": "token", "dynamic": True},
        ),
    ),
    "FP8 by tensors": (
        _fp8_one,
        _compressed(
            "float-quantized",
            _FLOAT8 | {"strategy": "tensor"},
            _FLOAT8 | {"strategy": "tensor", "dynamic": False},
        ),
    ),
    "FP8 by blocks": (
        _fp8_blocks,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [GROUP, GROUP],
            "modules_to_not_convert": [
                *(f"model.layers.{n}.self_attn.{part}_proj" for n in range(LAYERS) for part in "qkvo"),
                *(f"model.layers.{n}.mlp.gate" for n in range(LAYERS)),
                "lm_head",
            ],
        },
    ),
    "W8A8": (
        _int8,
        _compressed(
            "int-quantized", _INT8 | {"strategy": "channel"}, _INT8 | {"strategy": "token", "dynamic": True}
        ),
    ),
    "AWQ": (
        _awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "modules_to_not_convert": ["self_attn", "mlp.gate", "lm_head"],
        },
    ),
    "GPTQ": (
        _gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "desc_act": False,
            "sym": True,
            "dynamic": {"-:.*self_attn.*": {}, r"-:.*gate$": {}},
        },
    ),
}
"""Name → how a projection's tensors are drawn, and what config.json says of the format."""


def quantise_experts(path: Path, out: Path, name: str, *, seed: int = 7) -> Path:
    """A copy of the checkpoint with every expert's projections in the format."""
    draw, described = FORMATS[name]
    source = Source(seed)

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for tensor in [n for n in tensors if PROJECTION.match(n)]:
            projection = tensor.removesuffix(".weight")
            for suffix, drawn in draw(source, *tensors.pop(tensor).shape).items():
                tensors[f"{projection}.{suffix}"] = drawn

    change(path, out, quantise)
    return describe(out, described)


def quantise_quark(path: Path, out: Path, name: str, *, seed: int = 7) -> Path:
    """A copy of a gpt-oss as AMD's Quark writes it: an expert at a time, gate and up in turns, input scales.

    `name` is "FP8" (one scale for a weight) or "MXFP4".
    """
    source = Source(seed)

    def weight(outputs: int, inputs: int) -> dict[str, torch.Tensor]:
        if name == "FP8":
            return {"weight": source.float8(outputs, inputs), "weight_scale": source.scales(0.2)}
        codes = source.bits(torch.uint8, outputs, inputs // 2)
        exponents = (source.bits(torch.uint8, outputs, inputs // 32) & 3) + 122
        return {"weight": codes, "weight_scale": exponents}

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for tensor in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            stack, _, projection = tensor.rpartition(".")
            bias = tensors.pop(f"{tensor}_bias")
            experts, inputs, outputs = tensors.pop(tensor).shape
            for expert in range(experts):
                parts = weight(outputs, inputs) | {
                    "bias": bias[expert].clone(),
                    "input_scale": source.scales(0.02),
                }
                tensors |= {f"{stack}.{expert}.{projection}.{suffix}": part for suffix, part in parts.items()}

    change(path, out, quantise)
    fp8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
    mxfp4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    weights = fp8 if name == "FP8" else mxfp4 | {"is_dynamic": False, "symmetric": True}
    scheme = {"weight": weights, "input_tensors": fp8, "output_tensors": None, "bias": None}
    layers = [f"model.layers.{layer}" for layer in range(LAYERS)]
    return describe(
        out,
        {
            "quant_method": "quark",
            "export": {"kv_cache_group": [], "pack_method": "reorder"},
            "exclude": [
                *(f"{layer}.self_attn.{part}_proj" for layer in layers for part in "qkvo"),
                *(f"{layer}.mlp.router" for layer in layers),
                "lm_head",
            ],
            "global_quant_config": scheme,
            "layer_quant_config": {},
            "layer_type_quant_config": {},
        },
    )


def describe(folder: Path, quantization: dict[str, Any]) -> Path:
    """Say in the folder's config.json how it is quantised."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder
