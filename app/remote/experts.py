"""Experts in a state dict: which of its tensors make up which expert, as the service's model names them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.status import Model


@dataclass(frozen=True)
class Split:
    """A state dict in two parts."""

    experts: dict[tuple[int, int], dict[str, Any]]
    """Layer and expert → the expert's tensors under the names of an upload."""
    rest: dict[str, Any]
    """All other tensors under their own names."""


def split_experts(state: Mapping[str, Any], model: Model) -> Split:
    """Take the experts out of a state dict in checkpoint names; stacks are cut into slices, not copied.

    An expert of which some tensors are missing stays in `rest`: it can still be patched. `model` is what
    `GET /v1/model` says.
    """
    experts: dict[tuple[int, int], dict[str, Any]] = {}
    rest = dict(state)
    for layer in model.expert_layers:
        for expert in range(model.experts):
            names = {one.name: _name(one.aliases[0], model, layer, expert) for one in model.expert_tensors}
            if not names.keys() or not all(name in state for name in names.values()):
                continue
            stacked = {one.name: not _numbered(one.aliases[0]) for one in model.expert_tensors}
            experts[layer, expert] = {
                short: state[name][expert] if stacked[short] else state[name] for short, name in names.items()
            }
            for name in names.values():
                rest.pop(name, None)
    return Split(experts, rest)


def _numbered(name: str) -> bool:
    """Whether the checkpoint has one tensor per expert: the name of the first one says so."""
    return ".experts.0." in name


def _name(first: str, model: Model, layer: int, expert: int) -> str:
    """The checkpoint tensor of another layer and expert, from its name for the first ones."""
    before, found, after = first.rpartition(f".layers.{model.expert_layers[0]}.")
    head, numbered, last = after.rpartition(".experts.0.")
    rest = f"{head}.experts.{expert}.{last}" if numbered else after
    return f"{before}.layers.{layer}.{rest}" if found else first
