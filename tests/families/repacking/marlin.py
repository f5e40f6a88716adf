"""What rearranges weights for Marlin's kernels."""

import torch

from tests.families.repacking.functions import Case
from tests.families.repacking.layers import BF16, DIRECT, I32, REBUILT, ZEROS, E, K, N, on, put


def _order(bits: int) -> torch.Tensor:
    from vllm.model_executor.layers.quantization.utils.marlin_utils_test import get_weight_perm

    return get_weight_perm(bits)


MARLIN = (
    Case(
        "marlin_utils.marlin_pad_qweight",
        "GPTQ weights",
        {"w": ((6, 48), I32)},
        on("w", 48, 48, 64, 128),
        DIRECT,
    ),
    Case(
        "marlin_utils.marlin_pad_scales",
        "scales of groups",
        {"scale": ((2, 48), BF16)},
        on("scale", 48, 64, 64, 128, 32),
        DIRECT,
    ),
    Case("marlin_utils.marlin_pad_dim", "biases", {"bias": ((48,), BF16)}, on("bias", 48, 64), DIRECT),
    Case(
        "marlin_utils.marlin_permute_scales",
        "scales of groups",
        {"scale": ((4, N), BF16)},
        on("scale", K, N, 32),
        DIRECT,
        variant="by group",
    ),
    Case(
        "marlin_utils.marlin_permute_scales",
        "scales of channels",
        {"scale": ((1, N), BF16)},
        on("scale", K, N, -1),
        DIRECT,
        variant="by channel",
    ),
    Case("marlin_utils.marlin_permute_bias", "biases", {"bias": ((N,), BF16)}, on("bias"), DIRECT),
    Case(
        "marlin_utils.marlin_act_int8_process_scales",
        "scales with int8 activations",
        {"scale": ((4, N), BF16)},
        on("scale"),
        REBUILT,
    ),
    Case(
        "marlin_utils.marlin_moe_permute_scales",
        "scales of groups",
        {"scale": ((E, 4, N), BF16)},
        on("scale", K, N, 32),
        DIRECT,
        E,
    ),
    Case(
        "marlin_utils.marlin_zero_points",
        "zero points",
        {"zeros": ((4, N), I32)},
        on("zeros", 4, N, 4),
        REBUILT,
        variant="of 4 bits",
    ),
    Case(
        "marlin_utils.marlin_zero_points",
        "zero points",
        {"zeros": ((4, N), I32)},
        on("zeros", 4, N, 8),
        REBUILT,
        variant="of 8 bits",
    ),
    Case(
        "marlin_utils.awq_to_marlin_zero_points",
        ZEROS,
        {"zeros": ((4, N // 8), I32)},
        on("zeros", 4, N, 4),
        REBUILT,
    ),
    Case(
        "marlin_utils.moe_awq_to_marlin_zero_points",
        ZEROS,
        {"zeros": ((E, 4, N // 8), I32)},
        on("zeros", 4, N, 4),
        REBUILT,
        E,
    ),
    Case(
        "marlin_utils.moe_packed_to_marlin_zero_points",
        ZEROS,
        {"zeros": ((E, 4, N // 8), I32)},
        on("zeros", 4, N, 4),
        REBUILT,
        E,
    ),
    Case(
        "marlin_utils_test.marlin_permute_weights",
        "weights, one a word",
        {"w": ((K, N), I32)},
        lambda f, layer: put(layer, w=f(layer.w.data, K, N, torch.arange(1024).view(32, 32).t().reshape(-1))),
        DIRECT,
    ),
    Case(
        "marlin_utils_test.marlin_weights",
        "weights of 4 bits",
        {"w": ((K, N), I32)},
        lambda f, layer: put(layer, w=f(layer.w.data, K, N, 4, _order(4))),
        REBUILT,
        variant="of 4 bits",
    ),
    Case(
        "marlin_utils_test.marlin_weights",
        "weights of 8 bits",
        {"w": ((K, N), I32)},
        lambda f, layer: put(layer, w=f(layer.w.data, K, N, 8, _order(8))),
        REBUILT,
        variant="of 8 bits",
    ),
)
