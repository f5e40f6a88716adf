"""How vLLM's methods call functions that rearrange weights, and small layers to call them on."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

I32, U8, F32, BF16 = torch.int32, torch.uint8, torch.float32, torch.bfloat16
F8 = torch.float8_e4m3fn
DIRECT, REBUILT = "direct", "rebuilt"
E, N, K = 4, 64, 128
"""Experts, width between their two projections, width of the model."""


def put(layer: Any, **tensors: torch.Tensor | None) -> None:
    """Let the layer hold these in the place of its parameters, or beside them; None ends one."""
    for name, tensor in tensors.items():
        kept = tensor is None or isinstance(tensor, nn.Parameter) or name not in layer._parameters
        setattr(layer, name, tensor if kept else nn.Parameter(tensor, requires_grad=False))


def on(names: str, *arguments: Any, **options: Any) -> Callable[[Callable[..., Any], Any], None]:
    """Call the function with these parameters, then `arguments`; what it returns takes their places.

    Of more results than parameters the others are kept beside them.
    """

    def process(function: Callable[..., Any], layer: Any) -> None:
        wanted = names.split()
        found = function(*(getattr(layer, name).data for name in wanted), *arguments, **options)
        results: Sequence[Any] = found if isinstance(found, tuple) else (found,)
        more = (f"made{number}" for number in range(len(results)))
        tensors = [result for result in results if isinstance(result, torch.Tensor)]
        put(layer, **dict(zip([*wanted, *more], tensors, strict=False)))

    return process


def on_layer(function: Callable[..., Any], layer: Any) -> None:
    """The function changes the layer itself."""
    function(layer)


def of_layer(names: str, *before: Any, after: tuple[Any, ...] = ()) -> Callable[..., None]:
    """As `on`, for functions that are given the layer too."""

    def process(function: Callable[..., Any], layer: Any) -> None:
        on(names)(lambda *tensors: function(*before, layer, *tensors, *after), layer)

    return process


def backend(module: str, kind: str, name: str) -> Any:
    """A member of one of vLLM's enumerations of backends."""
    from importlib import import_module

    return getattr(
        getattr(import_module(f"vllm.model_executor.layers.fused_moe.oracle.{module}"), kind), name
    )


def quantised_type(count: int) -> Any:
    from vllm.scalar_type import scalar_types

    return {4: scalar_types.uint4b8, 8: scalar_types.uint8b128}[count]


def of_activation(name: str) -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    return getattr(MoEActivation, name)


class Members:
    """As vLLM's configuration of experts, of which each layer has its own."""

    def __init__(self, **members: Any) -> None:
        self.__dict__ |= members


def moe_config(**members: Any) -> Members:
    return Members(
        moe_parallel_config=SimpleNamespace(enable_eplb=False),
        num_experts=E,
        num_local_experts=E,
        hidden_dim=K,
        hidden_dim_unpadded=None,
        intermediate_size_per_partition=N,
        is_act_and_mul=True,
        **members,
    )


GATED = SimpleNamespace(is_gated=True)
LINEAR: dict[str, Any] = {
    "output_size_per_partition": N,
    "input_size_per_partition": K,
    "params_dtype": BF16,
    "orig_dtype": BF16,
}
MOE: dict[str, Any] = {
    "intermediate_size_per_partition": N,
    "hidden_size": K,
    "params_dtype": BF16,
    "orig_dtype": BF16,
    "activation": GATED,
    "num_groups_w13": 2,
    "num_groups_w2": 2,
}
REPACK = ("marlin_repack",)
CUDA = ("cuda",)

NVFP4: dict[str, Any] = {
    "w13": ((E, 2 * N, K // 2), U8),
    "w13_scale": ((E, 2 * N, K // 16), F8),
    "w13_scale_2": ((E,), F32),
    "w2": ((E, K, N // 2), U8),
    "w2_scale": ((E, K, N // 16), F8),
    "w2_scale_2": ((E,), F32),
}
NVFP4_STATIC = {
    "w13": NVFP4["w13"],
    "w13_scale": NVFP4["w13_scale"],
    "w13_scale_2": NVFP4["w13_scale_2"],
    "a13_scale": ((E, 2), F32),
    "w2": NVFP4["w2"],
    "w2_scale": NVFP4["w2_scale"],
    "w2_scale_2": NVFP4["w2_scale_2"],
    "a2_scale": ((E,), F32),
}
STATIC_NAMES = " ".join(NVFP4_STATIC)
MXFP4: dict[str, Any] = {
    "w13": ((E, 2 * N, K // 2), U8),
    "w2": ((E, K, N // 2), U8),
    "w13_scale": ((E, 2 * N, K // 32), U8),
    "w2_scale": ((E, K, N // 32), U8),
    "w13_bias": ((E, 2 * N), BF16),
    "w2_bias": ((E, K), BF16),
}
FP8: dict[str, Any] = {
    "w13": ((E, 2 * N, K), F8),
    "w2": ((E, K, N), F8),
    "w13_scale": ((E, 2 * N, 1), F32),
    "w2_scale": ((E, K, 1), F32),
}
FP8_BLOCKS = FP8 | {"w13_scale": ((E, 4, K // 32), F32), "w2_scale": ((E, K // 32, N // 32), F32)}
MXFP8 = FP8 | {"w13_scale": ((E, 2 * N, K // 32), U8), "w2_scale": ((E, K, N // 32), U8)}
WNA16: dict[str, Any] = {
    "w13": ((E, 2 * N, K // 8), I32),
    "w2": ((E, K, N // 8), I32),
    "w13_scale": ((E, 2 * N, K // 32), BF16),
    "w2_scale": ((E, K, N // 32), BF16),
    "w13_zeros": ((E, 2 * N // 8, K // 32), I32),
    "w2_zeros": ((E, K // 8, N // 32), I32),
}
AWQ: dict[str, Any] = {
    "w13": ((E, K, 2 * N // 8), I32),
    "w2": ((E, N, K // 8), I32),
    "w13_scale": ((E, K // 32, 2 * N), BF16),
    "w2_scale": ((E, N // 32, K), BF16),
    "w13_zeros": ((E, K // 32, 2 * N // 8), I32),
    "w2_zeros": ((E, N // 32, K // 8), I32),
}
WNA16_NAMES = " ".join(WNA16)
ZEROS = "packed zero points"
