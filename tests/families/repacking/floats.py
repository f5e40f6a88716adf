"""What rescales fp8 weights, and what makes weights fp8."""

from collections.abc import Callable
from typing import Any

from tests.families.repacking.functions import Case
from tests.families.repacking.layers import BF16, DIRECT, F8, F32, FP8, REBUILT, U8, E, K, N, on, put


def _by_largest(function: Callable[..., Any], layer: Any) -> None:
    scale, weight = function(layer.w.data, layer.scale.data, [16, 48])
    put(layer, w=weight, scale=scale)


FLOATS = (
    Case(
        "fp8_utils.requant_weight_ue8m0_inplace",
        "fp8 weights with scales of blocks",
        {"w": ((N, K), F8), "scale": ((2, 4), F32)},
        lambda f, layer: f(layer.w.data, layer.scale.data, (32, 32)),
        REBUILT,
    ),
    Case("fp8_utils._upcast_e8m0_to_fp32", "MXFP8 scales", {"scale": ((N, 4), U8)}, on("scale"), REBUILT),
    Case("fp8_utils._maybe_pad_fp8_weight", "fp8 weights", {"w": ((N, K), F8)}, on("w"), DIRECT),
    Case(
        "fp8_utils.process_fp8_weight_channel_strategy",
        "an fp8 linear",
        {"w": ((N, K), F8), "scale": ((N, 1), F32)},
        on("w scale"),
        DIRECT,
    ),
    Case(
        "fp8_utils.process_fp8_weight_block_strategy",
        "an fp8 linear",
        {"w": ((N, K), F8), "scale": ((2, 4), F32)},
        on("w scale"),
        DIRECT,
    ),
    Case(
        "fp8_utils.process_fp8_weight_tensor_strategy",
        "a fused fp8 linear",
        {"w": ((N, K), F8), "scale": ((2,), F32)},
        on("w scale", [16, 48]),
        REBUILT,
        stand_ins=("scaled_fp8_quant",),
    ),
    Case(
        "fp8_utils.process_fp8_weight_tensor_strategy_moe",
        "fp8 experts with two scales each",
        {"w13": FP8["w13"], "w13_scale": ((E, 2), F32)},
        lambda f, layer: on("w13 w13_scale")(lambda w, s: f(w, s, N, w.shape[0]), layer),
        REBUILT,
        E,
        stand_ins=("scaled_fp8_quant",),
    ),
    Case(
        "fp8_utils.process_fp8_input_tensor_strategy_moe",
        "scales of activations",
        {"a13_scale": ((E,), F32), "a2_scale": ((E,), F32)},
        on("a13_scale a2_scale", False),
        REBUILT,
        E,
    ),
    Case(
        "w8a8_utils.convert_to_channelwise",
        "scales of a fused linear",
        {"scale": ((2,), F32)},
        on("scale", [16, 48]),
        REBUILT,
    ),
    Case(
        "w8a8_utils.requantize_with_max_scale",
        "a fused fp8 linear",
        {"w": ((N, K), F8), "scale": ((2,), F32)},
        lambda f, layer: _by_largest(f, layer),
        REBUILT,
        stand_ins=("scaled_fp8_quant",),
    ),
    Case(
        "w8a8_utils.normalize_e4m3fn_to_e4m3fnuz",
        "fp8 weights for ROCm",
        {"w": ((N, K), F8), "scale": ((N, 1), F32)},
        on("w scale"),
        REBUILT,
    ),
    Case(
        "deep_gemm.per_block_cast_to_fp8",
        "weights made fp8",
        {"w": ((N, K), BF16)},
        on("w", [32, 32], True),
        REBUILT,
    ),
)
