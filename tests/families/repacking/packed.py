"""What packs, unpacks and pads weights of a few bits."""

from collections.abc import Callable
from typing import Any

import torch

from tests.families.repacking.functions import Case
from tests.families.repacking.layers import (
    AWQ,
    BF16,
    CUDA,
    DIRECT,
    F32,
    FP8_BLOCKS,
    I32,
    MOE,
    REBUILT,
    REPACK,
    U8,
    WNA16,
    WNA16_NAMES,
    E,
    K,
    N,
    on,
    put,
    quantised_type,
)


def _packing(dimension: int) -> Callable[..., None]:
    return lambda function, layer: put(
        layer, w=function(layer.w.data, quantised_type(4), dimension).contiguous()
    )


def _quantising(function: Callable[..., Any], layer: Any) -> None:
    _, packed, scale, *_ = function(layer.w.data.float(), quantised_type(4), 32)
    put(layer, w=None, packed=packed, scale=scale)


def _to_fp8(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from tests.families.reference import scaled_fp8_quant

    return scaled_fp8_quant(scale, use_per_token_if_dynamic=True)


def _dequantised(function: Callable[..., Any], layer: Any) -> None:
    whole = function(layer.w.data, layer.scale.data, layer.zeros.data, True)
    put(layer, w=whole, scale=None, zeros=None)


def _emulated(function: Callable[..., Any], layer: Any) -> None:
    w13, w2, *_ = function(*(getattr(layer, name).data for name in WNA16))
    put(layer, **dict.fromkeys(WNA16, None))
    put(layer, w13=w13, w2=w2)


PACKED = (
    Case(
        "quant_utils.pack_quantized_values_into_int32",
        "weights, one a word",
        {"w": ((N, K), I32)},
        _packing(1),
        REBUILT,
    ),
    Case(
        "quant_utils.unpack_quantized_values_into_int32",
        "packed weights",
        {"w": ((N, K // 8), I32)},
        _packing(1),
        REBUILT,
    ),
    Case("quant_utils.pack_rows", "weights, one a word", {"w": ((K, N), I32)}, on("w", 4, K, N), REBUILT),
    Case("quant_utils.pack_cols", "weights, one a word", {"w": ((K, N), I32)}, on("w", 4, K, N), REBUILT),
    Case("quant_utils.unpack_cols", "packed weights", {"w": ((K, N // 8), I32)}, on("w", 4, K, N), REBUILT),
    Case("quant_utils.gptq_pack", "weights, one a word", {"w": ((K, N), I32)}, on("w", 4, K, N), REBUILT),
    Case("quant_utils.awq_pack", "weights, one a word", {"w": ((K, N), I32)}, on("w", 4, K, N), REBUILT),
    Case(
        "quant_utils.gptq_quantize_weights", "weights made int4", {"w": ((K, N), F32)}, _quantising, REBUILT
    ),
    Case("quant_utils.quantize_weights", "weights made int4", {"w": ((K, N), F32)}, _quantising, REBUILT),
    Case(
        "quant_utils.convert_packed_uint4b8_to_signed_int4_inplace",
        "packed weights",
        {"w": ((N, K // 8), I32)},
        on("w"),
        REBUILT,
        stand_ins=CUDA,
    ),
    Case(
        "quant_utils.convert_bf16_scales_to_fp8",
        "scales for W4A8",
        {"scale": ((E, N, 4), BF16)},
        lambda f, layer: put(
            layer, **dict(zip(("scale", "of_channels"), f(_to_fp8, layer.scale.data), strict=True))
        ),
        REBUILT,
        E,
        stand_ins=CUDA,
    ),
    Case(
        "auto_awq._convert_awq_to_standard_format",
        "an AWQ linear",
        {"qweight": ((K, N // 8), I32), "qzeros": ((4, N // 8), I32)},
        lambda f, layer: f(layer, "qweight", "qzeros", 4),
        REBUILT,
        stand_ins=("one_rank",),
    ),
    Case(
        "quark.utils.canonicalize_quark_packed_int4",
        "Quark's packed weights",
        {"w": ((K, N // 8), I32)},
        on("w", pack_reorder=False, is_symmetric=True),
        REBUILT,
    ),
    Case(
        "rdna_hybrid_w4a16.pack_int4_exllama_shuffle",
        "weights, one a byte",
        {"w": ((N, K), U8)},
        on("w"),
        REBUILT,
    ),
    Case("rdna_hybrid_w4a16.pack_skinny_int4", "weights, one a byte", {"w": ((N, K), U8)}, on("w"), REBUILT),
    Case(
        "experts.xpu_moe.prepare_fp8_moe_layer_for_xpu",
        "fp8 experts",
        FP8_BLOCKS,
        on("w13 w13_scale w2 w2_scale"),
        DIRECT,
        E,
    ),
    Case(
        "oracle.int_wna16._pad_w13_shard_cols",
        "experts",
        {"w13": ((E, K, 96), I32)},
        on("w13", 48, N),
        DIRECT,
        E,
    ),
    Case("oracle.int_wna16._pad_rows", "experts", {"w2": ((E, 48, K), I32)}, on("w2", N), DIRECT, E),
    Case(
        "oracle.int_wna16._pad_w13_bias",
        "biases of experts",
        {"w13_bias": ((E, 96), BF16)},
        on("w13_bias", 48, N),
        DIRECT,
        E,
    ),
    Case(
        "oracle.int_wna16._process_weights_marlin",
        "WNA16 experts with zero points",
        WNA16,
        lambda f, layer: on(WNA16_NAMES)(lambda *tensors: f(layer, None, 4, 8, 32, *tensors), layer),
        {name: DIRECT if "scale" in name else REBUILT for name in WNA16},
        E,
        MOE,
        REPACK,
    ),
    Case(
        "oracle.int_wna16._process_awq_weights_marlin",
        "AWQ experts",
        AWQ,
        lambda f, layer: on(WNA16_NAMES)(lambda *tensors: f(layer, 4, 8, 32, None, *tensors), layer),
        {name: DIRECT if "scale" in name else REBUILT for name in WNA16},
        E,
        MOE,
        REPACK,
    ),
    Case(
        "oracle.int_wna16._process_weights_xpu",
        "WNA16 experts",
        {name: WNA16[name] for name in ("w13", "w2", "w13_scale", "w2_scale")},
        lambda f, layer: on("w13 w2 w13_scale w2_scale")(lambda *tensors: f(None, None, *tensors), layer),
        {"w13": REBUILT, "w2": REBUILT, "w13_scale": DIRECT, "w2_scale": DIRECT},
        E,
    ),
    Case(
        "oracle.int_wna16._convert_moe_wna16_humming_tensors",
        "WNA16 experts as bytes",
        {"qweight": ((E, N, K // 2), U8), "scales": ((E, N, K // 32), BF16), "qzeros": ((E, N // 2, 4), U8)},
        lambda f, layer: put(
            layer,
            qweight=None,
            qzeros=None,
            **f({name: p.data for name, p in layer._parameters.items()}, True),
        ),
        {"qweight": REBUILT, "scales": DIRECT, "qzeros": REBUILT},
        E,
    ),
    Case(
        "oracle.int_wna16._unpack_and_dequant_int4_gptq",
        "GPTQ experts",
        {"w": ((E, K // 8, N), I32), "scale": ((E, 4, N), BF16), "zeros": ((E, 4, N // 8), I32)},
        lambda f, layer: _dequantised(f, layer),
        REBUILT,
        E,
    ),
    Case(
        "oracle.int_wna16._unpack_and_dequant_int4_awq",
        "AWQ experts",
        {"w": ((E, K, N // 8), I32), "scale": ((E, 4, N), BF16), "zeros": ((E, 4, N // 8), I32)},
        lambda f, layer: _dequantised(f, layer),
        REBUILT,
        E,
    ),
    Case(
        "oracle.int_wna16._process_weights_emulation_gptq",
        "GPTQ experts",
        WNA16,
        lambda f, layer: _emulated(f, layer),
        REBUILT,
        E,
    ),
    Case(
        "oracle.int_wna16._process_weights_emulation_awq",
        "AWQ experts",
        AWQ,
        lambda f, layer: _emulated(f, layer),
        REBUILT,
        E,
    ),
    Case(
        "oracle.w4a8_int8.pack_int4_weights_for_kleidi",
        "int4 weights for KleidiAI",
        {"w": ((N, K), torch.int8), "scale": ((N, 4), BF16)},
        lambda f, layer: put(layer, w=f(layer.w.data, layer.scale.data, None, K, N, 32), scale=None),
        REBUILT,
    ),
    Case(
        "oracle.w4a8_int8.convert_to_w4a8_int8_moe_format",
        "int4 experts for KleidiAI",
        {
            "w13": ((E, 2 * N, K), torch.int8),
            "w2": ((E, K, N), torch.int8),
            "w13_scale": ((E, 2 * N, 4), BF16),
            "w2_scale": ((E, K, 2), BF16),
        },
        on("w13 w2 w13_scale w2_scale", 32),
        REBUILT,
        E,
    ),
)
