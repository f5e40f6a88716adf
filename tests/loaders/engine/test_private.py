"""Private copies: what belongs to a module is copied with it, once; all else is shared."""

import functools
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.vllm


class Kernel:
    """An object of a layer, as vLLM's kernels are."""

    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)

    def run(self) -> Any:
        return self


@dataclass(frozen=True)
class Settings:
    """vLLM's settings of kernels are frozen."""

    kernel: Any


class Backend(Enum):
    """One of a few."""

    ONE = 1


for owned in (Kernel, Settings, Backend):
    owned.__module__ = "vllm.made_up"


class Configuration:
    """What is vLLM's and belongs to no module."""


Configuration.__module__ = "vllm.config.made_up"


def copy_of(module: nn.Module, instead: dict[int, nn.Module] | None = None) -> Any:
    from loaders.engine.private import private_copy

    return private_copy(module, instead)


def test_an_object_that_is_met_twice_is_copied_once() -> None:
    """Wherever the copy refers to an object it is the same one: in containers, in each other, in circles."""
    module: Any = nn.Module()
    module.kernel = Kernel()
    module.kernel.itself = module.kernel
    module.kernel.layer = module
    module.all = [module.kernel, {"again": (module.kernel,)}]
    copied = copy_of(module)
    assert copied.kernel is not module.kernel and copied.all is not module.all
    assert copied.kernel.itself is copied.all[0] is copied.all[1]["again"][0] is copied.kernel
    assert copied.kernel.layer is copied


def test_methods_and_partials_lead_into_the_copy() -> None:
    """What is bound to an object of the module is bound to its copy."""
    module: Any = nn.Module()
    module.kernel = Kernel()
    module.bound = module.kernel.run
    module.later = functools.partial(module.kernel.run, module.kernel, key=[module.kernel])
    copied = copy_of(module)
    assert copied.bound() is copied.kernel
    assert copied.later.func.__self__ is copied.kernel
    assert copied.later.args == (copied.kernel,) and copied.later.keywords == {"key": [copied.kernel]}
    assert module.bound() is module.kernel and module.later.args == (module.kernel,)


def test_frozen_objects_are_copied_too() -> None:
    """What a frozen dataclass holds may be written although the dataclass may not."""
    module: Any = nn.Module()
    module.settings = Settings(Kernel())
    copied = copy_of(module)
    assert copied.settings is not module.settings
    assert copied.settings.kernel is not module.settings.kernel


def test_what_is_shared() -> None:
    """Tensors, modules, configuration, members of enumerations, classes, strangers' objects and functions."""
    module: Any = nn.Module()
    shared = {
        "tensor": torch.ones(2),
        "config": Configuration(),
        "backend": Backend.ONE,
        "kind": Kernel,
        "stranger": torch.Generator(),
        "function": len,
    }
    for name, value in shared.items():
        setattr(module, name, value)
    module.child = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.ones(2))
    copied = copy_of(module)
    assert all(getattr(copied, name) is value for name, value in shared.items())
    assert copied.child is module.child and copied.weight is module.weight
    copied.weight = None
    copied.more = 1
    assert module.weight is not None and not hasattr(module, "more")


def test_other_modules_in_the_place_of_some() -> None:
    """`instead` is followed wherever the module appears: as a child, in an object, and bound."""
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    module: Any = nn.Module()
    module.child = old
    module.kernel = Kernel(layer=old)
    module.forward_of = old.forward
    copied = copy_of(module, {id(old): new})
    assert copied.child is copied.kernel.layer is copied.forward_of.__self__ is new
    assert module.child is module.kernel.layer is old


@pytest.mark.parametrize("package", ["vllm.made_up", "somebody.elses"])
def test_processing_a_copy_leaves_the_twin_as_it_was(package: str) -> None:
    """A method keeps what it made on itself: in the copy's own method, whoever wrote it."""
    from loaders.engine.dependents import Assembly, collect_all
    from tests.loaders.engine import layers

    method_type = type("Keeping", (layers.Method,), {"__module__": package})

    def process(layer: Any) -> None:
        layer.quant_method.kept = layer.weight * 2
        layer.weight = None

    twin = layers.layer(method_type(process))
    processed = layers.workshop().processed(Assembly(twin), {"weight": layers.drawn(1)})
    assert set(collect_all(processed).tensors) == {"quant_method.kept"}
    assert not hasattr(twin.quant_method, "kept") and twin.weight.is_meta
