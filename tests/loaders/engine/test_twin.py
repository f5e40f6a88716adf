"""The twin loads what the checkpoint holds, also where vLLM quantises while it loads."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.vllm

Loader = Callable[..., Any]


def wrapped(loader: Loader) -> Loader:
    """As vLLM 0.32 wraps loaders for online quantisation."""

    @functools.wraps(loader, assigned=("__doc__", "__annotations__"))
    def online_process_loader(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the twin would be processed")

    return online_process_loader


def test_online_quantisation_is_unwrapped() -> None:
    """However often a loader was wrapped, and only by that; others stay as they are."""
    from loaders.engine.twin import _unwrap_loaders

    def loader(parameter: nn.Parameter, value: torch.Tensor) -> None: ...

    def other(parameter: nn.Parameter, value: torch.Tensor) -> None: ...

    model: Any = nn.Module()
    for name in ("plain", "once", "twice", "none"):
        model.register_parameter(name, nn.Parameter(torch.empty(1)))
    model.plain.weight_loader = functools.wraps(loader)(other)
    kept = model.plain.weight_loader
    model.once.weight_loader = wrapped(loader)
    model.twice.weight_loader = wrapped(wrapped(loader))
    _unwrap_loaders(model)
    assert model.plain.weight_loader is kept
    assert model.once.weight_loader is model.twice.weight_loader is loader
    assert not hasattr(model.none, "weight_loader")


def test_vllm_wraps_as_expected() -> None:
    """What vLLM puts around loaders has the name and the inner loader that the twin looks for."""
    from vllm.model_executor.model_loader.reload import layerwise

    from tests.loaders.engine import layers

    layer = layers.layer(layers.Method())
    layer.weight.weight_loader = loader = functools.partial(print)
    loader.__name__ = "loader"  # type: ignore[attr-defined]
    layerwise._wrap_parameters_weight_loader(layer)
    assert layer.weight.weight_loader is not loader

    from loaders.engine.twin import _unwrap_loaders

    _unwrap_loaders(layer)
    assert layer.weight.weight_loader is loader


def test_a_twin_shares_nothing_that_holds_weights() -> None:
    """A module or parameter of the live model is refused; others are not."""
    from loaders.engine.twin import _refuse_sharing

    live, twin = nn.Module(), nn.Module()
    live.rotary = twin.rotary = nn.Identity()
    live.layer, twin.layer = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    _refuse_sharing(twin, live)
    twin.more = nn.Linear(2, 2)
    _refuse_sharing(twin, live)
    twin.more.weight = nn.Parameter(live.layer.weight.data)
    with pytest.raises(RuntimeError, match=r"more\.weight is not its own"):
        _refuse_sharing(twin, live)
    twin.more = live.layer
    with pytest.raises(RuntimeError, match="shares module more"):
        _refuse_sharing(twin, live)
