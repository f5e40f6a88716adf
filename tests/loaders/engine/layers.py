"""Small linear layers with made-up methods, as vLLM would hold them. Importing this imports vLLM."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from loaders.engine.workshop import Workshop

ROWS, COLUMNS = 4, 6


class Method(QuantizeMethodBase):
    """Processes with `process` and applies with `kernel`; as it is, does nothing to the weight."""

    def __init__(
        self,
        process: Callable[[Any], object] = lambda layer: None,
        kernel: Callable[[Any, torch.Tensor], torch.Tensor] = lambda layer, x: x @ layer.weight.t(),
    ) -> None:
        self.process, self.kernel = process, kernel
        self.processing = f"{process.__module__}.{process.__qualname__}"  # methods of two sorts are two kinds

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.process(layer)

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.kernel(layer, args[0])


class Attention(nn.Module, AttentionLayerBase):
    """Splits the weight of the layer beside it, as MLA does; `beside` is another module's weight."""

    def __init__(self, source: nn.Module, beside: torch.Tensor | None = None) -> None:
        super().__init__()
        self.source, self.beside = source, beside

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        weight: Any = self.source.weight
        self.upper = (weight[: ROWS // 2] * 2).t().contiguous()
        if self.beside is not None:
            self.mixed = self.beside * 2

    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: Any) -> None:
        return None


class Model(nn.Module):
    """One layer, and what derives state from it if `attention`; loads by name."""

    def __init__(self, layer: nn.Module, attention: bool = False) -> None:
        super().__init__()
        self.layer = layer
        if attention:
            self.attention = Attention(layer)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self.get_parameter(name).data.copy_(weight)


def layer(method: QuantizeMethodBase, weight: torch.Tensor | None = None, **more: torch.Tensor) -> Any:
    """A linear layer; a twin on the meta device unless a weight is given."""
    made = LinearBase(COLUMNS, ROWS, params_dtype=torch.float32, disable_tp=True)
    made.quant_method = method
    found = torch.empty(ROWS, COLUMNS, device="meta") if weight is None else weight.clone()
    for name, value in {"weight": found, **more}.items():
        made.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return made


def config() -> Any:
    """A real configuration, but for the model's."""
    made: Any = VllmConfig()
    made.model_config = SimpleNamespace(dtype=torch.float32, hf_config=None)
    return made


def workshop() -> Workshop:
    """A workshop for float32."""
    return Workshop(config())


def drawn(seed: int) -> torch.Tensor:
    """A weight."""
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))
