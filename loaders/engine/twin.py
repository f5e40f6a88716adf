"""The twin: the served model built once more on the meta device, in checkpoint format for ever.

Its parameters take next to no memory and keep the shapes and loaders that vLLM's
`load_weights` expects, while the live model's have been repacked or removed by
`process_weights_after_loading`.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

_FACTORIES: frozenset[Callable[..., Any]] = frozenset(
    {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.empty_strided, torch.full}
)

_SCALES = 1024
"""Elements of a parameter of experts that keeps its values: loaders ask whether a scale was loaded yet."""


class _FactoriesOnMeta(TorchFunctionMode):
    """Send tensor factories to the meta device, but for integers and what is small.

    `torch.device("meta")` as a context would also catch the expert maps of expert
    parallelism, whose construction calls `nonzero` and `item` on what it made.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        integral_map = func is torch.full or not _holds_weights(dtype)
        if func not in _FACTORIES or integral_map:
            return func(*args, **kwargs)
        made = func(*args, **kwargs | {"device": "meta"})
        return made if made.numel() > _SCALES else func(*args, **kwargs)


def _holds_weights(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype in (torch.uint8, torch.int8, torch.int32)


def build_twin(vllm_config: VllmConfig, live: nn.Module) -> nn.Module:
    """Build the twin of `live`.

    Nothing that vLLM keeps per model is shared: the compilation config gets its own
    registries of layers and the quantisation config is a copy.

    Raises RuntimeError if the twin shares a parameter or a module that has
    parameters with the live model.
    """
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.mode = CompilationMode.NONE
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    config.quant_config = copy.deepcopy(vllm_config.quant_config)
    device = torch.device(vllm_config.device_config.device_type)
    with set_default_torch_dtype(vllm_config.model_config.dtype), device, _FactoriesOnMeta():
        twin: nn.Module = initialize_model(vllm_config=config, model_config=vllm_config.model_config)
    _refuse_sharing(twin, live)
    _keep_values_of_experts_only(twin)
    _unwrap_loaders(twin)
    return twin


def _keep_values_of_experts_only(twin: nn.Module) -> None:
    """What is computed from a parameter on meta is on meta too, and so is seen not to be known."""
    instead: dict[int, nn.Parameter] = {}
    for module in twin.modules():
        if isinstance(module, RoutedExperts):
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                module._parameters[name] = instead.setdefault(id(parameter), _on_meta(parameter))


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter without its values: its class, shape and loader."""
    meta = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    meta.__class__ = parameter.__class__
    meta.__dict__ = dict(parameter.__dict__)
    return meta


def _unwrap_loaders(twin: nn.Module) -> None:
    """Online quantisation processes a layer when its last weight is loaded; the twin only loads.

    vLLM 0.32 wraps the loaders of such layers. Without the wrapper they load what the
    checkpoint holds, and processing is run where it is wanted.
    """
    for parameter in twin.parameters():
        loaded: Any = parameter
        while getattr(getattr(loaded, "weight_loader", None), "__name__", "") == "online_process_loader":
            loaded.weight_loader = loaded.weight_loader.__wrapped__


def _refuse_sharing(twin: nn.Module, live: nn.Module) -> None:
    """vLLM caches rotary modules process-wide; those hold no parameters and are allowed."""
    live_modules = {id(module) for module in live.modules()}
    for name, module in twin.named_modules():
        if id(module) in live_modules and any(True for _ in module.parameters()):
            raise RuntimeError(f"the twin shares module {name} with the live model")
    live_storages = {parameter.untyped_storage()._cdata for parameter in live.parameters()}
    for name, parameter in twin.named_parameters():
        if not parameter.is_meta and parameter.untyped_storage()._cdata in live_storages:
            raise RuntimeError(f"the twin's parameter {name} is not its own")
