"""Private copies of a module's own objects: what processing writes into must belong to the copy alone.

A module keeps schemes, kernels and backends in attributes, and
`process_weights_after_loading` leaves handles and bound methods in them. Whatever is
vLLM's and may be written is copied with it; tensors, other modules, configuration and
communicators are shared.
"""

import functools
import sys
from collections.abc import Mapping
from copy import copy
from enum import Enum
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

M = TypeVar("M", bound=nn.Module)

_SHARED = ("vllm.config", "vllm.distributed", "vllm.transformers_utils")
"""Packages of vLLM whose objects belong to the whole engine."""
_LIBRARIES = sys.stdlib_module_names | {
    "torch",
    "numpy",
    "transformers",
    "triton",
    "pydantic",
    "zmq",
    "msgspec",
}


def is_owned(value: Any) -> bool:
    """Whether this is an object of vLLM's, or of a plugin's, that belongs to the module that has it."""
    package = type(value).__module__
    return (
        package.partition(".")[0] not in _LIBRARIES
        and not package.startswith(_SHARED)
        and not isinstance(value, torch.Tensor | Enum | type)
        and (not isinstance(value, nn.Module) or isinstance(value, QuantizeMethodBase))
    )


def private_copy(module: M, instead: Mapping[int, object] | None = None) -> M:
    """A copy of `module` whose own objects are copies too.

    `instead` says, by id, which modules and tensors the copy refers to in the place of others.
    """
    copier = _Copier(dict(instead or {}))
    clone = copy(module)
    copier.made[id(module)] = clone
    clone.__dict__ = {name: copier.of(value) for name, value in vars(module).items()}
    return clone


class _Copier:
    """Copies what is owned, once; `made` keeps what stands for an object that was met."""

    def __init__(self, made: dict[int, Any]) -> None:
        self.made = made

    def of(self, value: Any) -> Any:
        """What stands for `value` in the copy."""
        if id(value) in self.made:
            return self.made[id(value)]
        if type(value) is dict:
            return {key: self.of(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.of(item) for item in value)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self.of(value.__self__))
        if isinstance(value, functools.partial):
            arguments = (self.of(item) for item in value.args)
            keywords = {name: self.of(item) for name, item in value.keywords.items()}
            return functools.partial(self.of(value.func), *arguments, **keywords)
        return self._object(value) if is_owned(value) and hasattr(value, "__dict__") else value

    def _object(self, value: Any) -> Any:
        clone = copy(value)
        self.made[id(value)] = clone
        if clone is not value:
            # Past the guard of frozen dataclasses, which vLLM's configurations of kernels are.
            object.__setattr__(clone, "__dict__", {name: self.of(item) for name, item in vars(value).items()})
        return clone
