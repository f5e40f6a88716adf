"""Modules that derive state from another one's weights: found, named, processed together."""

from typing import Any

import pytest
import torch
from torch import nn

from schemas.model import Treatment

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def made() -> Any:
    from tests.loaders.engine import layers

    return layers


def assembly(made: Any, weight: torch.Tensor | None = None) -> Any:
    from loaders.engine.dependents import assemblies

    return assemblies(made.Model(made.layer(made.Method(), weight), attention=True))["layer"]


def test_who_depends_on_a_module(made: Any) -> None:
    """An attention layer belongs to the module that it, or an object of its own, holds on to."""
    from loaders.engine.dependents import assemblies

    model: Any = made.Model(made.layer(made.Method()), attention=True)
    model.other = made.Attention(nn.Linear(1, 1))
    impl: Any = type("Impl", (), {"__module__": "vllm.made_up"})()
    impl.projection, model.other.impl = model.layer, impl
    found = assemblies(model)
    assert [name for name, _ in found["layer"].dependents] == ["attention", "other"]
    assert [name for name, _ in found["other.source"].dependents] == ["other"]


def test_paths_and_names(made: Any) -> None:
    """`@0.…` is a path into the first dependent; all other paths are the module's own."""
    found = assembly(made)
    assert found.named("weight", "model.layer") == "model.layer.weight"
    assert found.named("@0.upper", "model.layer") == "attention.upper"


def test_the_same_in_another_model(made: Any) -> None:
    """Modules are found by name, also where LoRA has put a layer around them."""
    found = assembly(made)
    live: Any = made.Model(made.layer(made.Method(), made.drawn(1)), attention=True)
    modules = dict(live.named_modules())
    assert found.like(modules, "layer").module is live.layer
    assert found.like(modules, "layer").dependents == (("attention", live.attention),)
    wrapper: Any = nn.Module()
    wrapper.base_layer = live.layer
    wrapped: Any = nn.Module()
    wrapped.layer, wrapped.attention = wrapper, live.attention
    assert found.like(dict(wrapped.named_modules()), "layer").module is live.layer


def test_state_of_a_processed_assembly(made: Any) -> None:
    """Of a dependent only what processing has made counts; what was there before is no part of it."""
    from loaders.engine.dependents import collect_all, collect_processed

    found = assembly(made)
    found.dependents[0][1].scale = torch.ones(3)
    weight = made.drawn(1)
    processed = made.workshop().processed(found, {"weight": weight.clone()})
    assert processed.dependents[0][1].source is processed.module
    assert set(collect_all(processed).tensors) == {"weight", "@0.scale", "@0.upper"}
    state = collect_processed(processed, found)
    assert set(state.tensors) == {"weight", "@0.upper"}
    assert torch.equal(state.tensors["@0.upper"], (weight[:2] * 2).t())
    assert not hasattr(found.dependents[0][1], "upper")


def test_what_needs_other_weights_too_is_refused(made: Any) -> None:
    """State that came out on the meta device was derived from a module that was not given."""
    from loaders.engine.kind import learn

    found = assembly(made)
    found.dependents[0][1].beside = torch.empty(2, device="meta")
    kind = learn(made.workshop(), found)
    assert kind.parameters["weight"].reason == "@0.mixed is derived from several modules"


def test_a_weight_with_dependents_is_rebuilt(made: Any) -> None:
    """Its own elements could be patched alone, but not what the other module made of them."""
    from loaders.engine.kind import learn

    kind = learn(made.workshop(), assembly(made))
    assert kind.parameters["weight"].treatment is Treatment.REBUILT
    assert kind.derived == ("@0.upper",)
    assert kind.tensors == {"weight": torch.float32, "@0.upper": torch.float32}
