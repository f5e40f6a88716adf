"""Kinds of modules: what processing does to their parameters, learned and proved.

Two modules of one kind (class, method, shapes, dtypes) are treated alike. A
treatment counts only when it is proved on random values: patching a module that
was processed with old values must give what processing the new values gives, in
every tensor and in the outputs of the kernels.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from loaders.engine.dependents import Assembly, collect_processed
from loaders.engine.draws import ordinary, strange
from loaders.engine.few import alone, experts_learned, small
from loaders.engine.handles import keep, swap
from loaders.engine.layout import Layout
from loaders.engine.move import Move, Scatter, bits_of, same_bits
from loaders.engine.nature import nature
from loaders.engine.spot import Spot, identity, learn_spots
from loaders.engine.state import ModuleState, is_dense, span
from loaders.engine.workshop import NoProbe, Probe, Values, Workshop, quant_method
from schemas.model import Treatment

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ParameterKind:
    """How one parameter of a kind of module is updated."""

    treatment: Treatment
    spots: tuple[Spot, ...]
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """What is known of a kind of module and its dependents."""

    parameters: dict[str, ParameterKind]
    handles: tuple[str, ...]
    tensors: dict[str, torch.dtype]
    """Runtime tensors by path, as they must be found in a live module."""
    sharing: frozenset[tuple[str, ...]] = frozenset()
    """Which of them are views of one memory, as they must be too."""
    derived: tuple[str, ...] = ()
    """Those that are computed from parameters, and are made anew when it is rebuilt."""

    @property
    def proved(self) -> bool:
        """Whether every parameter is; what failed, perhaps for want of memory, is worth another try."""
        return all(one.treatment is not Treatment.UNSUPPORTED for one in self.parameters.values())


def signature(twin: Assembly) -> tuple[Any, ...]:
    """Key of the assembly's kind: equal keys mean equal treatment."""
    module = twin.module
    return (
        nature(module),
        nature(quant_method(module)),
        tuple((name, tuple(p.shape), p.dtype) for name, p in own_parameters(module).items()),
        tuple(nature(dependent) for _, dependent in twin.dependents),
    )


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the module itself, without its children's."""
    return {name: p for name, p in module._parameters.items() if p is not None}


def learn(workshop: Workshop, twin: Assembly) -> Kind:
    """Learn and prove the treatment of each parameter of the twin's kind; what fails is unsupported."""
    parameters = own_parameters(twin.module)
    if quant_method(twin.module) is None and not twin.dependents:
        return Kind(
            {
                name: ParameterKind(Treatment.DIRECT, (identity(name, p.numel()),))
                for name, p in parameters.items()
            },
            (),
            {name: p.dtype for name, p in parameters.items()},
            frozenset((name,) for name in parameters),
        )
    try:
        return _Bench(workshop, twin).learn()
    except (NoProbe, ValueError) as error:
        return unsupported(twin.module, str(error))
    except Exception as error:  # noqa: BLE001 - processing may raise what it likes; the engine serves nevertheless
        _log.debug("could not be learned", exc_info=True)
        return unsupported(twin.module, f"could not be learned: {type(error).__name__}: {error}")


def unsupported(twin: nn.Module, reason: str) -> Kind:
    """The kind of a module that is not touched."""
    refused = ParameterKind(Treatment.UNSUPPORTED, (), reason)
    return Kind(dict.fromkeys(own_parameters(twin), refused), (), {})


class _Bench:
    """One learning session on small copies of one module."""

    def __init__(self, workshop: Workshop, twin: Assembly) -> None:
        self._workshop = workshop
        self._experts = experts_learned(twin.module)
        self._twin = alone(twin, self._experts)
        self._shapes = {
            name: (small(tuple(p.shape), twin.module, self._experts), p.dtype)
            for name, p in own_parameters(twin.module).items()
        }
        self._probe: Probe = workshop.probe(twin.module, self._experts or None)
        self._generator = torch.Generator().manual_seed(1)

    def learn(self) -> Kind:
        """Raises ValueError if the state of a processed module cannot be told."""
        old, new = self._random(), self._random()
        spots, seen = self._seen(old, new)  # the copies that were looked at are gone: they may take gigabytes
        proved = {name: self._prove(name, spots[name], seen.derived, old, new) for name in self._shapes}
        return replace(seen, parameters=proved)

    def _seen(self, old: Values, new: Values) -> tuple[dict[str, list[Spot]], Kind]:
        """Where processing puts the elements of each parameter, and what else is known without a proof."""
        state, others = self._state(self._processed(old)), [self._state(self._processed(new))]
        extreme = self._strange()
        after = self._processed_strange(extreme)
        others += [after] if after else []
        moving = self._moving(state, others)
        spots = self._spots(old, moving)
        for name, found in spots.items():
            spots[name] = _standing(found, extreme[name], after.tensors) if after else []
        tensors = {path: tensor.dtype for path, tensor in state.tensors.items()}
        return spots, Kind({}, tuple(state.handles), tensors, state.sharing(), _derived(moving, spots))

    def _processed(self, values: Values) -> Assembly:
        return self._workshop.processed(self._twin, {name: value.clone() for name, value in values.items()})

    def _committed(self, values: Values) -> Assembly:
        """A processed copy as earlier commits leave one: its handles read no tensor of it by pointer."""
        copy = self._processed(values)
        handles = self._state(copy).handles
        if handles:
            made = self._state(self._processed(values))
            for path, handle in handles.items():
                keep(made.handles[path], tuple(made.tensors.values()))
                swap(handle, made.handles[path])
        return copy

    def _state(self, processed: Assembly) -> ModuleState:
        return collect_processed(processed, self._twin)

    def _random(self) -> Values:
        return {name: ordinary(self._generator, name, *spec) for name, spec in self._shapes.items()}

    def _strange(self) -> Values:
        """Any finite values: tiny, huge, zero, for what processing does to those alone."""
        return {name: strange(self._generator, name, *spec) for name, spec in self._shapes.items()}

    def _processed_strange(self, values: Values) -> ModuleState | None:
        """State of a copy with such values, if processing does not refuse them: then none counts as moved."""
        try:
            return self._state(self._processed(values))
        except Exception as error:  # noqa: BLE001 - processing may raise what it likes when it is fed with those
            _log.debug("strange values were refused: %s", error)
            return None

    @staticmethod
    def _moving(state: ModuleState, others: list[ModuleState]) -> Values:
        """Tensors that are not the same whatever the weights are, as an expert map is."""
        return {
            path: tensor
            for path, tensor in state.tensors.items()
            if not all(path in other.tensors and same_bits(tensor, other.tensors[path]) for other in others)
        }

    def _spots(self, values: Values, moving: Values) -> dict[str, list[Spot]]:
        """Identities are seen on random values; only what was repacked is learned by codes."""
        spots: dict[str, list[Spot]] = {}
        for name, value in values.items():
            flat = value.view(-1)
            kept = [path for path, tensor in moving.items() if same_bits(span(tensor).cpu(), flat)]
            spots[name] = [identity(path, value.numel()) for path in kept]
        explained = {spot.path for found in spots.values() for spot in found}
        if explained != moving.keys():
            learned = self._learned(moving)
            spots = {
                name: found or _standing(learned[name], values[name], moving) for name, found in spots.items()
            }
        return spots

    def _learned(self, moving: Values) -> dict[str, list[Spot]]:
        def repacked(codes: Values) -> dict[str, torch.Tensor]:
            """Tensors in the order of their memory, where it is all theirs."""
            state = self._state(self._processed(codes))
            found = state.tensors.items()
            return {path: span(t).cpu() for path, t in found if path in moving and is_dense(t)}

        try:
            return learn_spots(self._shapes, max(self._experts, 1), repacked)
        except Exception as error:  # noqa: BLE001 - processing may raise what it likes when it is fed with codes
            _log.debug("codes were refused: %s", error)
            return {name: [] for name in self._shapes}

    def _prove(
        self, name: str, spots: list[Spot], derived: tuple[str, ...], old: Values, new: Values
    ) -> ParameterKind:
        """Patch one parameter of an old module and compare with processing the new value."""
        value = {**old, name: new[name]}
        target = self._processed(value)
        wanted = self._workshop.outputs(target.module, self._probe)
        patched = self._committed(old)
        read = not _equal(self._workshop.outputs(patched.module, self._probe), wanted)
        if not read and not (spots and not self._state(patched).handles):
            # Where all can be seen, what is there and not read (a shape, say) needs no kernel's word.
            return ParameterKind(
                Treatment.UNSUPPORTED, (), f"changing {name} does not change the probe's output"
            )
        for treatment in self._attempts(patched, spots, derived, name, value):
            if self._agree(patched, target, wanted):
                return ParameterKind(treatment, tuple(spots))
        return ParameterKind(Treatment.UNSUPPORTED, (), f"a patched {name} does not equal a reloaded one")

    def _attempts(
        self, patched: Assembly, spots: list[Spot], derived: tuple[str, ...], name: str, values: Values
    ) -> Iterator[Treatment]:
        """First elements alone; then what is derived from them too, made anew from the new values."""
        state, value = self._state(patched), values[name]
        for spot in spots:
            numel = value.numel()
            place = (
                Layout.contiguous((numel,))
                if spot.is_identity
                else Scatter(spot.positions(torch.arange(numel)))
            )
            Move(spot.path, place, bits_of(value.reshape(-1))).write(span(state.tensors[spot.path]))
        if spots:
            yield Treatment.DIRECT
        if not (state.handles or derived):
            return
        # Not taken from the copy that is compared with: processing must come to the same each time.
        made = self._state(self._processed(values))
        for path in derived:
            state.tensors[path].copy_(made.tensors[path])
        for path, handle in state.handles.items():
            swap(handle, made.handles[path])
        yield Treatment.REBUILT

    def _agree(self, patched: Assembly, target: Assembly, wanted: list[torch.Tensor]) -> bool:
        ours, theirs = self._state(patched).tensors, self._state(target).tensors
        return (
            ours.keys() == theirs.keys()
            and all(same_bits(ours[path], theirs[path]) for path in ours)
            and _equal(self._workshop.outputs(patched.module, self._probe), wanted)
        )


def _standing(spots: list[Spot], value: torch.Tensor, tensors: Values) -> list[Spot]:
    """The spots, if values stand there as codes did: processing may change some values and not others."""
    wanted = bits_of(value.view(-1))
    for spot in spots:
        bits = bits_of(span(tensors[spot.path]).cpu()) if spot.path in tensors else wanted[:0]
        if not same_bits(_found(spot, bits, value.numel()), wanted):
            return []
    return spots


def _found(spot: Spot, bits: torch.Tensor, numel: int) -> torch.Tensor:
    """Where a parameter of so many elements would stand in `bits`; nothing if some of it is beyond."""
    if spot.is_identity:
        return bits
    positions = spot.positions(torch.arange(numel))
    beyond = numel > 0 and int(positions.max()) >= bits.numel()
    return bits[:0] if beyond else bits[positions]


def _derived(moving: Values, spots: dict[str, list[Spot]]) -> tuple[str, ...]:
    """Tensors that new elements cannot simply be written into.

    When the elements of some parameter were not found, they may be in any tensor that is not just another.
    """
    lost = not all(spots.values())
    settled = {spot.path for found in spots.values() for spot in found if spot.is_identity or not lost}
    return tuple(path for path in moving if path not in settled)


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))
