"""Natures: equal for objects that are treated alike, different for others, the same text everywhere."""

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.vllm


class Mode(Enum):
    FAST = 1
    SLOW = 2


class Scheme:
    """Stands for an object of a plugin's."""

    def __init__(self, **members: Any) -> None:
        self.__dict__ |= members


def nature(value: Any) -> object:
    from loaders.engine.nature import nature as of

    return of(value)


def module(**members: Any) -> nn.Module:
    made = nn.Module()
    for name, value in members.items():
        setattr(made, name, value)
    return made


def test_layers_of_one_kind_are_alike() -> None:
    """Which layer it is, its weights and hooks do not count."""
    first = module(prefix="layers.0", layer_idx=0, scheme=Scheme(bits=8, layer_name="a"))
    other = module(prefix="layers.1", layer_idx=1, scheme=Scheme(bits=8, layer_name="b"))
    other.weight = nn.Parameter(torch.ones(3))
    other.register_forward_hook(lambda *_: None)
    assert repr(nature(first)) == repr(nature(other))


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "number": (8, 4),
    "dtype": (torch.int8, torch.uint8),
    "enum": (Mode.FAST, Mode.SLOW),
    "list": ([128, 128], [128, 64]),
    "dictionary": ({"strategy": "token"}, {"strategy": "tensor"}),
    "class": (nn.Linear, nn.Bilinear),
    "function": (torch.nn.functional.relu, torch.nn.functional.gelu),
    "an object's member": (Scheme(group=32), Scheme(group=64)),
    "a deeper one": (Scheme(inner=[Scheme(group=32)]), Scheme(inner=[Scheme(group=64)])),
    "an object's class": (Scheme(), SimpleNamespace()),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_whatever_may_matter_tells_them_apart(what: str) -> None:
    """Two modules that differ in this are two kinds, and each is like itself."""
    one, other = DIFFERENT[what]
    assert repr(nature(module(member=one))) == repr(nature(module(member=one)))
    assert repr(nature(module(member=one))) != repr(nature(module(member=other)))


def test_classes_from_outside_carry_their_source() -> None:
    """A plugin whose code changed is another one; vLLM is known by its version."""
    from vllm.model_executor.layers.linear import LinearBase

    from loaders.engine.nature import origin

    assert len(origin(Scheme).split()) == 2
    assert origin(LinearBase) == "vllm.model_executor.layers.linear.LinearBase"


def test_objects_that_hold_each_other_end() -> None:
    """Natures are finite."""
    one, other = Scheme(), Scheme()
    one.other, other.other = other, one  # type: ignore[attr-defined]
    assert len(repr(nature(one))) < 2000
