"""What vLLM rearranges weights with after loading: every such function, and what of it is tried where.

Names are kept as text, so that this can be read without importing vLLM.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

_LAYERS = "vllm.model_executor.layers"
_UTILS = f"{_LAYERS}.quantization.utils"
_MOE = f"{_LAYERS}.fused_moe"
MODULES = {
    **{
        name: f"{_UTILS}.{name}"
        for name in (
            "b12x_moe",
            "flashinfer_fp4_moe",
            "flashinfer_mxint4_moe",
            "flashinfer_utils",
            "fp8_utils",
            "marlin_utils",
            "marlin_utils_fp4",
            "marlin_utils_fp8",
            "marlin_utils_test",
            "mxfp4_utils",
            "mxfp8_utils",
            "nvfp4_emulation_utils",
            "nvfp4_utils",
            "quant_utils",
            "w8a8_utils",
            "humming.linear",
            "humming.moe",
        )
    },
    **{
        name: f"{_MOE}.{name}"
        for name in (
            "oracle.fp8",
            "oracle.int8",
            "oracle.int_wna16",
            "oracle.mxfp4",
            "oracle.mxfp8",
            "oracle.nvfp4",
            "oracle.unquantized",
            "oracle.w4a8",
            "oracle.w4a8_int8",
            "b12x",
            "experts.cpu_moe",
            "experts.cutlass_moe",
            "experts.xpu_moe",
        )
    },
    "custom_ops": "vllm._custom_ops",
    "auto_awq": f"{_LAYERS}.quantization.auto_awq",
    "quark.utils": f"{_LAYERS}.quantization.quark.utils",
    "qutlass_utils": f"{_LAYERS}.quantization.qutlass_utils",
    "rdna_hybrid_w4a16": "vllm.model_executor.kernels.linear.mixed_precision.rdna_hybrid_w4a16",
    "deep_gemm": "vllm.utils.deep_gemm",
}
"""Where vLLM 0.32 keeps them."""
_REARRANGING = re.compile(
    "pad|pack|permut|swizz|shuffl|interleav|reorder|swap|rotate|align|prepare|process|convert|zero_points"
    "|marlin_weights|requant|upcast|normalize|synthesize|blocked|bias_into|canonical|block_cast|transform"
    "|quantize_weights"
)
"""What is in the names of functions that may rearrange weights."""

Shaped = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Case:
    """One function on the parameters of a small layer; `process` calls it as vLLM's methods would.

    With `experts`, the layer holds that many, on the first dimension of every parameter.
    """

    name: str
    """Module, as `MODULES` has it, and function."""
    rearranges: str
    parameters: dict[str, Shaped]
    process: Callable[[Callable[..., Any], Any], None]
    treatment: str | dict[str, str]
    """Of all parameters, or of each."""
    experts: int = 0
    members: dict[str, Any] = field(default_factory=dict)
    """Attributes that the function reads from the layer."""
    stand_ins: tuple[str, ...] = ()
    """What of a GPU is replaced here by something in plain torch, as `stand_ins` has it."""
    variant: str = ""

    @property
    def title(self) -> str:
        """Name of the test."""
        return f"{self.name} {self.variant}".strip()

    def treatment_of(self, parameter: str) -> str:
        """How Graft is to update it."""
        return self.treatment if isinstance(self.treatment, str) else self.treatment[parameter]


def resolve(name: str) -> Callable[..., Any]:
    """The function; imports vLLM."""
    importlib.import_module(f"{_MOE}.layer")  # the others import each other in a circle that begins here
    module, _, function = name.rpartition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(MODULES[module]), function)
    return found


def all_functions() -> Iterator[str]:
    """Every function of the modules that its name takes for one that rearranges; imports vLLM."""
    importlib.import_module(f"{_MOE}.layer")
    for short, full in MODULES.items():
        for name, value in vars(importlib.import_module(full)).items():
            own = inspect.isroutine(value) and getattr(value, "__module__", None) == full
            if own and _REARRANGING.search(name):
                yield f"{short}.{name}"
