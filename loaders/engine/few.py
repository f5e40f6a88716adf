"""Few experts: copies of a layer of experts that hold as many as it takes to see how all are treated."""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from loaders.engine.dependents import Assembly
from loaders.engine.private import private_copy
from loaders.engine.workshop import local_experts

_EXPERTS_LEARNED = 2
"""Enough experts to see that all are treated alike."""
_COUNTS = frozenset({"num_experts", "num_local_experts", "local_num_experts", "global_num_experts"})
"""Where vLLM's layers of experts keep how many there are."""


def alone(twin: Assembly, experts: int) -> Assembly:
    """The twin with as few experts, numbered from 0, as the small copies that are learned on."""
    if not experts:
        return twin
    numbers: torch.Tensor | None = getattr(twin.module, "_expert_map", None)
    instead = {}
    if numbers is not None:
        instead[id(numbers)] = torch.arange(experts, dtype=numbers.dtype, device=numbers.device)
    module: Any = private_copy(twin.module, instead)
    for owner in (module, module.moe_config):
        for name in _COUNTS & vars(owner).keys():
            setattr(owner, name, experts)
    return Assembly(module, twin.dependents)


def experts_learned(twin: nn.Module) -> int:
    """How many experts the copies have; 0 where there are none."""
    return min(_EXPERTS_LEARNED, local_experts(twin)) if isinstance(twin, RoutedExperts) else 0


def small(shape: tuple[int, ...], twin: nn.Module, experts: int) -> tuple[int, ...]:
    """The shape that a parameter of the twin has in a copy of so many experts."""
    if experts and shape and isinstance(twin, RoutedExperts) and shape[0] == local_experts(twin):
        return (experts, *shape[1:])
    return shape
