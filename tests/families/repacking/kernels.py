"""What rearranges weights for FlashInfer's, CUTLASS's and b12x's kernels."""

from collections.abc import Callable
from typing import Any

from tests.families.repacking.functions import Case
from tests.families.repacking.layers import (
    BF16,
    CUDA,
    DIRECT,
    F8,
    F32,
    FP8_BLOCKS,
    MOE,
    NVFP4,
    NVFP4_STATIC,
    REBUILT,
    STATIC_NAMES,
    U8,
    E,
    K,
    N,
    backend,
    moe_config,
    of_activation,
    of_layer,
    on,
)


def _cutedsl(function: Callable[..., Any], layer: Any) -> None:
    layer.activation = of_activation("SILU")
    of_layer(STATIC_NAMES)(function, layer)


def _fi_or_cutlass(function: Callable[..., Any], layer: Any) -> None:
    of_layer(STATIC_NAMES, backend("nvfp4", "NvFp4MoeBackend", "FLASHINFER_CUTLASS"), after=(True,))(
        function, layer
    )


KERNELS = (
    Case("flashinfer_utils.swap_w13_to_w31", "experts", {"w13": ((E, 2 * N, K), BF16)}, on("w13"), DIRECT, E),
    Case(
        "flashinfer_utils.align_moe_weights_for_fi",
        "experts",
        {"w13": ((E, 96, K), BF16), "w2": ((E, K, 48), BF16)},
        on("w13 w2", True, 64),
        DIRECT,
        E,
    ),
    Case(
        "flashinfer_utils.align_fp4_moe_weights_for_fi",
        "NVFP4 experts",
        {
            "w13": ((E, 96, K // 2), U8),
            "w13_scale": ((E, 96, K // 16), F8),
            "w2": ((E, K, 24), U8),
            "w2_scale": ((E, K, 3), F8),
        },
        on("w13 w13_scale w2 w2_scale", True, 64),
        DIRECT,
        E,
    ),
    Case(
        "flashinfer_utils.align_fp4_moe_hidden_dim_for_fi",
        "NVFP4 experts",
        {name: NVFP4[name] for name in ("w13", "w13_scale", "w2", "w2_scale")},
        on("w13 w13_scale w2 w2_scale"),
        DIRECT,
        E,
    ),
    Case(
        "flashinfer_utils.prepare_fp8_moe_layer_for_fi",
        "fp8 experts with scales of blocks",
        FP8_BLOCKS,
        lambda f, layer: on("w13 w2 w13_scale w2_scale")(
            lambda w13, w2, s13, s2: f(layer, w13, w2, s13, None, s2, None), layer
        ),
        {"w13": DIRECT, "w2": DIRECT, "w13_scale": REBUILT, "w2_scale": REBUILT},
        E,
        MOE | {"weight_block_size": [32, 32], "moe_config": moe_config()},
    ),
    Case(
        "flashinfer_fp4_moe.reorder_w1w3_to_w3w1",
        "NVFP4 experts",
        {"w13": NVFP4["w13"], "w13_scale": NVFP4["w13_scale"]},
        on("w13 w13_scale"),
        DIRECT,
        E,
    ),
    Case(
        "flashinfer_fp4_moe.interleave_linear_and_gate",
        "NVFP4 experts",
        {"w13": NVFP4["w13"]},
        on("w13", 32, 1),
        DIRECT,
        E,
    ),
    Case(
        "flashinfer_fp4_moe.reorder_w13_to_w31_for_flashinfer_cutedsl",
        "NVFP4 experts, interleaved",
        {"w13": NVFP4["w13"], "w13_scale": NVFP4["w13_scale"]},
        lambda f, layer: on("w13 w13_scale")(lambda w, s: f(of_activation("SWIGLUOAI"), w, s), layer),
        DIRECT,
        E,
    ),
    Case(
        "flashinfer_fp4_moe.prepare_nvfp4_moe_layer_for_flashinfer_cutedsl",
        "NVFP4 experts",
        NVFP4_STATIC,
        lambda f, layer: _cutedsl(f, layer),
        {"a13_scale": REBUILT, "a2_scale": REBUILT} | dict.fromkeys(NVFP4, DIRECT),
        E,
        MOE | {"moe_config": moe_config()},
        CUDA,
    ),
    Case(
        "flashinfer_fp4_moe.prepare_nvfp4_moe_layer_for_fi_or_cutlass",
        "NVFP4 experts",
        NVFP4_STATIC,
        lambda f, layer: _fi_or_cutlass(f, layer),
        {"a13_scale": REBUILT, "a2_scale": REBUILT} | dict.fromkeys(NVFP4, DIRECT),
        E,
        MOE | {"moe_config": moe_config()},
        CUDA,
    ),
    Case(
        "b12x_moe._pad_gated_weights",
        "NVFP4 experts",
        {
            "w13": ((E, 96, K // 2), U8),
            "w13_scale": ((E, 96, K // 16), F8),
            "w2": ((E, K, 24), U8),
            "w2_scale": ((E, K, 3), F8),
        },
        on("w13 w13_scale w2 w2_scale"),
        DIRECT,
        E,
    ),
    Case(
        "b12x_moe.prepare_nvfp4_moe_layer_for_b12x",
        "NVFP4 experts",
        NVFP4_STATIC,
        on(STATIC_NAMES, True, True),
        {"a13_scale": REBUILT} | dict.fromkeys((*NVFP4, "a2_scale"), DIRECT),
        E,
        stand_ins=CUDA,
    ),
    Case(
        "b12x._canonicalize_fp4_zero_signs_",
        "fp4 weights",
        {"w": ((E, N, K // 2), U8)},
        lambda f, layer: f(layer.w.data),
        REBUILT,
        E,
    ),
    Case(
        "b12x._normalize_expert_scale", "scales of experts", {"scale": ((E, 1), F32)}, on("scale"), DIRECT, E
    ),
    Case(
        "nvfp4_utils.swizzle_blockscale",
        "NVFP4 scales",
        {"scale": ((N, K // 16), F8)},
        on("scale"),
        DIRECT,
        stand_ins=CUDA,
        variant="of a linear",
    ),
    Case(
        "nvfp4_utils.swizzle_blockscale",
        "NVFP4 scales",
        {"scale": ((E, N, 6), F8)},
        on("scale"),
        DIRECT,
        E,
        stand_ins=CUDA,
        variant="of experts",
    ),
    Case(
        "nvfp4_utils.pad_nvfp4_weight_for_cutlass", "an NVFP4 linear", {"w": ((48, 24), U8)}, on("w"), DIRECT
    ),
    Case(
        "nvfp4_emulation_utils.convert_swizzled_to_linear",
        "NVFP4 scales",
        {"scale": ((K, 8), F8)},
        on("scale", K, K, 16),
        DIRECT,
    ),
    Case(
        "mxfp8_utils.swizzle_mxfp8_scale",
        "MXFP8 scales",
        {"scale": ((N, K // 32), U8)},
        on("scale", N, K),
        DIRECT,
    ),
    Case(
        "experts.cutlass_moe.swizzle_mxfp4_scales",
        "MXFP4 scales",
        {"scale": ((N, K // 32), U8)},
        on("scale", N, K),
        DIRECT,
    ),
    Case(
        "oracle.mxfp4._swizzle_cutlass_mxfp4_scales",
        "MXFP4 scales",
        {"scale": ((E, 128, K // 32), U8)},
        on("scale"),
        DIRECT,
        E,
    ),
    Case(
        "oracle.unquantized._zero_intermediate_padding",
        "padded experts",
        {"w13": ((E, 2 * N, K), BF16), "w2": ((E, K, N), BF16)},
        lambda f, layer: f(layer.moe_config, layer.w13.data, layer.w2.data),
        REBUILT,
        E,
        {"moe_config": moe_config(intermediate_size_per_partition_unpadded=48)},
    ),
    Case(
        "oracle.unquantized.convert_to_unquantized_kernel_format",
        "experts",
        {"w13": ((E, 2 * N, K), BF16), "w2": ((E, K, N), BF16)},
        lambda f, layer: on("w13 w2")(
            lambda *w: f(
                backend("unquantized", "UnquantizedMoeBackend", "FLASHINFER_CUTLASS"), layer.moe_config, *w
            ),
            layer,
        ),
        DIRECT,
        E,
        {"moe_config": moe_config()},
    ),
    Case("qutlass_utils.to_blocked", "MXFP4 scales", {"scale": ((K, 8), U8)}, on("scale", "torch"), DIRECT),
)
