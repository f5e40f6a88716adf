"""Kinds of modules: what processing does to their parameters, learned and proved.

Two modules of one kind (class, method, shapes, dtypes) are treated alike. A
treatment counts only when it is proved on random values: patching a module that
was processed with old values must give what processing the new values gives, in
every tensor and in the outputs of the kernels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from loaders.engine.handles import swap
from loaders.engine.spot import NotAnInjection, Spot, identity, learn_spots
from loaders.engine.state import ModuleState, collect
from loaders.engine.workshop import NoProbe, Probe, Values, Workshop, probe_for, quant_method
from schemas.model import Treatment

_EXPERTS_LEARNED = 2
"""Enough experts to see that all are treated alike."""


@dataclass(frozen=True, slots=True)
class ParameterKind:
    """How one parameter of a kind of module is updated."""

    treatment: Treatment
    spots: tuple[Spot, ...]
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """What is known of a kind of module."""

    parameters: dict[str, ParameterKind]
    handles: tuple[str, ...]
    tensors: dict[str, torch.dtype]
    """Runtime tensors by path, as they must be found in a live module."""


def signature(twin: nn.Module) -> tuple[Any, ...]:
    """Key of the module's kind: equal keys mean equal treatment."""
    method = quant_method(twin)
    plain = {
        name: value
        for name, value in vars(twin).items()
        if isinstance(value, bool | int | float | str) and not name.endswith(("prefix", "name", "idx", "id"))
    }
    return (
        type(twin),
        type(method),
        tuple(sorted(plain.items(), key=lambda item: item[0])),
        tuple((name, tuple(p.shape), p.dtype) for name, p in own_parameters(twin).items()),
    )


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the module itself, without its children's."""
    return {name: p for name, p in module._parameters.items() if p is not None}


def learn(workshop: Workshop, twin: nn.Module) -> Kind:
    """Learn and prove the treatment of each parameter of the twin's kind."""
    parameters = own_parameters(twin)
    if quant_method(twin) is None:
        return Kind(
            {
                name: ParameterKind(Treatment.DIRECT, (identity(name, p.numel()),))
                for name, p in parameters.items()
            },
            (),
            {name: p.dtype for name, p in parameters.items()},
        )
    try:
        return _Bench(workshop, twin).learn()
    except (NoProbe, NotAnInjection) as error:
        unsupported = ParameterKind(Treatment.UNSUPPORTED, (), str(error))
        return Kind(dict.fromkeys(parameters, unsupported), (), {})


class _Bench:
    """One learning session on small copies of one module."""

    def __init__(self, workshop: Workshop, twin: nn.Module) -> None:
        self._workshop = workshop
        self._twin = twin
        self._experts = _learned_experts(twin)
        self._shapes = {
            name: (_small(tuple(p.shape), twin, self._experts), p.dtype)
            for name, p in own_parameters(twin).items()
        }
        self._probe: Probe = probe_for(twin, self._experts)
        self._generator = torch.Generator().manual_seed(1)

    def learn(self) -> Kind:
        old, new = self._random(), self._random()
        state = collect(self._processed(old))
        spots = self._spots(old, state)
        parameters = {name: self._prove(name, spots[name], old, new) for name in self._shapes}
        return Kind(
            parameters,
            tuple(state.handles),
            {path: tensor.dtype for path, tensor in state.tensors.items()},
        )

    def _processed(self, values: Values) -> nn.Module:
        return self._workshop.processed(self._twin, {name: value.clone() for name, value in values.items()})

    def _random(self) -> Values:
        return {name: _draw(self._generator, *spec) for name, spec in self._shapes.items()}

    def _spots(self, values: Values, state: ModuleState) -> dict[str, list[Spot]]:
        """Identities are seen on random values; only what was repacked is learned by codes."""
        spots: dict[str, list[Spot]] = {}
        for name, value in values.items():
            kept = [path for path, tensor in state.tensors.items() if _same(tensor, value)]
            spots[name] = [identity(path, value.numel()) for path in kept]
        explained = {spot.path for found in spots.values() for spot in found}
        if explained != set(state.tensors):
            blocks = max(self._experts, 1)
            learned = learn_spots(self._shapes, blocks, lambda codes: collect(self._processed(codes)).tensors)
            spots = {name: spots[name] or learned[name] for name in spots}
        return spots

    def _prove(self, name: str, spots: list[Spot], old: Values, new: Values) -> ParameterKind:
        """Patch one parameter of an old module and compare with processing the new value."""
        target = self._processed({**old, name: new[name]})
        wanted = self._workshop.outputs(target, self._probe)
        patched = self._processed(old)
        if _equal(self._workshop.outputs(patched, self._probe), wanted):
            return ParameterKind(
                Treatment.UNSUPPORTED, (), f"changing {name} does not change the probe's output"
            )
        for treatment in self._attempts(patched, spots, target, new[name]):
            if self._agree(patched, target, wanted):
                return ParameterKind(treatment, tuple(spots))
        return ParameterKind(Treatment.UNSUPPORTED, (), f"a patched {name} does not equal a reloaded one")

    def _attempts(
        self, patched: nn.Module, spots: list[Spot], target: nn.Module, value: torch.Tensor
    ) -> Iterator[Treatment]:
        """First elements alone; then handles too, made anew from the new values."""
        state = collect(patched)
        for spot in spots:
            elements = torch.arange(value.numel())
            state.tensors[spot.path].view(-1)[spot.positions(elements)] = value.reshape(-1)
        yield Treatment.DIRECT
        made = collect(target).handles
        for path, handle in state.handles.items():
            swap(handle, made[path])
        if state.handles:
            yield Treatment.REBUILT
            # `target` was compared through its outputs, taken before its handles left it.

    def _agree(self, patched: nn.Module, target: nn.Module, wanted: list[torch.Tensor]) -> bool:
        ours, theirs = collect(patched).tensors, collect(target).tensors
        return (
            ours.keys() == theirs.keys()
            and all(_same(ours[path], theirs[path]) for path in ours)
            and _equal(self._workshop.outputs(patched, self._probe), wanted)
        )


def _learned_experts(twin: nn.Module) -> int:
    return min(_EXPERTS_LEARNED, _local_experts(twin)) if isinstance(twin, RoutedExperts) else 0


def _local_experts(twin: nn.Module) -> int:
    count: Any = twin.local_num_experts
    return int(count)


def _small(shape: tuple[int, ...], twin: nn.Module, experts: int) -> tuple[int, ...]:
    if experts and shape and shape[0] == _local_experts(twin):
        return (experts, *shape[1:])
    return shape


def _draw(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    raw = torch.randint(0, 100, shape, generator=generator, dtype=torch.uint8)
    return raw.view(dtype) if dtype.itemsize == 1 else raw.to(dtype)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality, so that NaN equals itself and -0 differs from 0."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and bool(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))
    )


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
