"""What rearranges fp4 and fp8 weights for Marlin's kernels."""

from collections.abc import Callable
from typing import Any

import torch

from tests.families.repacking.functions import Case
from tests.families.repacking.layers import (
    BF16,
    DIRECT,
    F8,
    F32,
    FP8_BLOCKS,
    LINEAR,
    MOE,
    MXFP4,
    MXFP8,
    NVFP4,
    REBUILT,
    REPACK,
    U8,
    E,
    K,
    N,
    moe_config,
    of_layer,
    on,
    on_layer,
    put,
)


def _with_factor(function: Callable[..., Any], layer: Any) -> None:
    scale, factor = function(layer.scale.data)
    put(layer, scale=scale, factor=torch.tensor(factor))


MARLIN_FLOATS = (
    Case(
        "marlin_utils_fp4.nvfp4_marlin_process_scales",
        "NVFP4 scales",
        {"scale": ((8, N), BF16)},
        lambda f, layer: _with_factor(f, layer),
        REBUILT,
    ),
    Case(
        "marlin_utils_fp4.nvfp4_marlin_process_global_scale",
        "NVFP4 global scales",
        {"scale": ((E,), BF16)},
        on("scale"),
        REBUILT,
        E,
    ),
    Case(
        "marlin_utils_fp4.mxfp4_marlin_process_scales",
        "MXFP4 scales",
        {"scale": ((4, N), BF16)},
        on("scale"),
        REBUILT,
    ),
    Case(
        "marlin_utils_fp4.mxfp4_marlin_process_scales",
        "MXFP4 scales with fp8 activations",
        {"scale": ((4, N), BF16)},
        on("scale", F8),
        REBUILT,
        variant="for fp8",
    ),
    Case(
        "marlin_utils_fp4.prepare_fp4_layer_for_marlin",
        "an MXFP4 linear",
        {"weight": ((N, K // 2), U8), "weight_scale": ((N, K // 32), U8), "bias": ((N,), BF16)},
        on_layer,
        {"weight": REBUILT, "weight_scale": DIRECT, "bias": DIRECT},
        members=LINEAR,
        stand_ins=REPACK,
        variant="MXFP4",
    ),
    Case(
        "marlin_utils_fp4.prepare_fp4_layer_for_marlin",
        "an NVFP4 linear",
        {"weight": ((N, K // 2), U8), "weight_scale": ((N, K // 16), F8), "weight_global_scale": ((1,), F32)},
        on_layer,
        REBUILT,
        members=LINEAR,
        stand_ins=REPACK,
        variant="NVFP4",
    ),
    Case(
        "marlin_utils_fp4._repack_marlin_experts",
        "fp4 experts",
        {"w13": MXFP4["w13"]},
        on("w13", 2 * N, K, False),
        REBUILT,
        E,
        stand_ins=REPACK,
    ),
    Case(
        "marlin_utils_fp4.prepare_nvfp4_moe_layer_for_marlin",
        "NVFP4 experts",
        NVFP4,
        of_layer(" ".join(NVFP4), after=(True,)),
        REBUILT,
        E,
        MOE,
        REPACK,
    ),
    Case(
        "marlin_utils_fp4.prepare_moe_fp4_layer_for_marlin",
        "NVFP4 experts",
        {
            f"w{n}_weight{part}": NVFP4[f"w{n}{part.removeprefix('_weight')}"]
            for n in (13, 2)
            for part in ("", "_scale", "_scale_2")
        },
        on_layer,
        REBUILT,
        E,
        MOE | {"moe_config": moe_config()},
        REPACK,
    ),
    Case(
        "marlin_utils_fp4.prepare_moe_mxfp4_layer_for_marlin",
        "MXFP4 experts",
        MXFP4,
        of_layer(" ".join(MXFP4)),
        dict.fromkeys(MXFP4, DIRECT) | {"w13": REBUILT, "w2": REBUILT},
        E,
        MOE,
        REPACK,
    ),
    Case(
        "marlin_utils_fp8.fp8_fused_exponent_bias_into_scales",
        "fp8 scales",
        {"scale": ((4, N), BF16)},
        on("scale"),
        REBUILT,
    ),
    Case("marlin_utils_fp8.pack_fp8_to_int32", "fp8 weights", {"w": ((N, K), F8)}, on("w"), REBUILT),
    Case(
        "marlin_utils_fp8._moe_pad_shard_rows",
        "experts",
        {"w13": ((E, 96, K), U8)},
        on("w13", 48, N),
        DIRECT,
        E,
    ),
    Case("marlin_utils_fp8._moe_pad_last", "experts", {"w2": ((E, K, 48), U8)}, on("w2", 48, N), DIRECT, E),
    Case(
        "marlin_utils_fp8.mxfp8_marlin_process_scales",
        "MXFP8 scales",
        {"scale": ((4, N), BF16)},
        on("scale"),
        REBUILT,
    ),
    Case(
        "marlin_utils_fp8.prepare_fp8_layer_for_marlin",
        "an fp8 linear with a scale a channel",
        {"weight": ((N, K), F8), "weight_scale": ((N, 1), F32), "bias": ((N,), BF16)},
        lambda f, layer: f(layer, size_k_first=False),
        {"weight": REBUILT, "weight_scale": REBUILT, "bias": DIRECT},
        members=LINEAR,
        stand_ins=REPACK,
    ),
    Case(
        "marlin_utils_fp8.prepare_fp8_moe_layer_for_marlin",
        "fp8 experts with scales of blocks",
        FP8_BLOCKS,
        of_layer(" ".join(FP8_BLOCKS)),
        REBUILT,
        E,
        MOE | {"weight_block_size": [32, 32]},
        REPACK,
    ),
    Case(
        "marlin_utils_fp8.prepare_mxfp8_layer_for_marlin",
        "an MXFP8 linear",
        {"weight": ((N, K), F8), "weight_scale": ((N, K // 32), U8), "bias": ((N,), BF16)},
        on_layer,
        {"weight": REBUILT, "weight_scale": DIRECT, "bias": DIRECT},
        members=LINEAR,
        stand_ins=REPACK,
    ),
    Case(
        "marlin_utils_fp8.prepare_mxfp8_moe_layer_for_marlin",
        "MXFP8 experts",
        MXFP8,
        of_layer(" ".join(MXFP8)),
        {"w13": REBUILT, "w2": REBUILT, "w13_scale": DIRECT, "w2_scale": DIRECT},
        E,
        MOE,
        REPACK,
    ),
)
