"""Everything that a module's kernels may read: registered tensors, hidden ones, and opaque handles.

`process_weights_after_loading` may replace registered parameters by attributes
that are not registered, keep a copy in a closure, or pack weights into a handle
behind a pointer. All of it is reached from the module object.
"""

import functools
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from vllm._custom_ops import CPUDNNLGEMMHandler
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from loaders.engine.private import is_owned

_DEPTH = 8
_KV_CACHE = "kv_cache"
"""Where vLLM's attention layers keep what they compute for requests, which is no weight."""


@dataclass(slots=True)
class ModuleState:
    """Tensors and handles of one module by the path that leads to them."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    handles: dict[str, CPUDNNLGEMMHandler] = field(default_factory=dict)

    def sharing(self) -> frozenset[tuple[str, ...]]:
        """Paths grouped by the memory that they are views of: a write to one may change others."""
        groups: dict[int, list[str]] = {}
        for path, tensor in self.tensors.items():
            groups.setdefault(tensor.untyped_storage()._cdata, []).append(path)
        return frozenset(tuple(sorted(paths)) for paths in groups.values())


def span(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from a tensor's first element to its last, with gaps if it has any, as a view [n]."""
    length = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.as_strided((length if tensor.numel() else 0,), (1,))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps, in whatever order."""
    sizes, strides = tensor.shape, tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], sizes[dim]))
    return tensor.permute(order).is_contiguous()


def collect(module: nn.Module) -> ModuleState:
    """Collect the state of `module` itself, without its child modules.

    Registered parameters and buffers come first; views of storage that was already
    reached are left out, empty tensors too.
    """
    walk = _Walk()
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        walk.visit(name, tensor, 0)
    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules", _KV_CACHE):
            walk.visit(name, value, 0)
    for name, child in module._modules.items():
        if isinstance(child, QuantizeMethodBase):
            walk.visit(name, child, 0)
    return walk.state


class _Walk:
    """Depth-first over attributes, containers and closures; every object once."""

    def __init__(self) -> None:
        self.state = ModuleState()
        self._seen: set[int] = set()
        self._storages: set[tuple[int, int, tuple[int, ...]]] = set()

    def visit(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, CPUDNNLGEMMHandler):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self.state.handles[path] = value
        elif depth < _DEPTH and id(value) not in self._seen:
            self._seen.add(id(value))
            for name, inner in _children(value):
                self.visit(f"{path}.{name}", inner, depth + 1)

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        if tensor.numel() == 0:
            return
        key = (tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tuple(tensor.shape))
        if key not in self._storages:
            self._storages.add(key)
            self.state.tensors[path] = tensor


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [(str(index), item) for index, item in enumerate(value)]
    if isinstance(value, functools.partial):
        return [("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [
            *((name, cell.cell_contents) for name, cell in cells if _filled(cell)),
            *((f"default{index}", item) for index, item in enumerate(value.__defaults__ or ())),
        ]
    if isinstance(value, MethodType | type) or (
        isinstance(value, nn.Module) and not isinstance(value, QuantizeMethodBase)
    ):
        return []
    return list(_attributes(value).items()) if is_owned(value) else []


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - reading is the only way to ask
    except ValueError:
        return False
    return True


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return found | getattr(value, "__dict__", {})
