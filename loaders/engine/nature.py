"""The nature of an object: what the treatment of a module may depend on, and nothing that differs by layer.

Equal natures have equal texts (`repr`), in this process and in a later one.
"""

import hashlib
import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from loaders.engine.private import is_owned

_DEPTH = 5
_PLACES = ("prefix", "name", "idx", "id")
"""Ends of names of members that say which layer this is."""
_OF_TORCH = frozenset(vars(nn.Module()))
"""Members that every module has: parameters, children, hooks."""


def nature(value: Any, depth: int = _DEPTH) -> object:
    """Class and members of an object, down to `depth` levels, as nested tuples."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | Enum):
        return value
    if isinstance(value, type):
        return origin(value)
    if isinstance(value, FunctionType | MethodType):
        return f"{value.__module__}.{value.__qualname__}"
    if depth == 0:
        return origin(type(value))
    if isinstance(value, list | tuple):
        return tuple(nature(item, depth - 1) for item in value)
    if isinstance(value, dict):
        return tuple(sorted(((str(key), nature(item, depth - 1)) for key, item in value.items()), key=repr))
    if is_owned(value) or isinstance(value, nn.Module):
        return (origin(type(value)), *_members(value, depth - 1))
    return origin(type(value))


def _members(value: Any, depth: int) -> Iterator[tuple[str, object]]:
    members = vars(value) if hasattr(value, "__dict__") else {}
    for name in sorted(members):
        if name not in _OF_TORCH and not name.endswith(_PLACES):
            yield name, nature(members[name], depth)


def origin(cls: type) -> str:
    """Where a class comes from; one from outside vLLM with a digest of the file that defines it."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls.__module__.startswith(("vllm.", "torch.", "builtins")):
        return name
    try:
        source = Path(inspect.getfile(cls)).read_bytes()
    except (TypeError, OSError):
        return name
    return f"{name} {hashlib.sha256(source).hexdigest()}"
