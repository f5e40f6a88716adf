"""One pass of vLLM's own `load_weights` over meta tensors, recorded as regions.

Views keep their geometry on meta, copies are followed, and a `copy_` into a twin
parameter becomes a region: these elements of that checkpoint tensor go to those
elements of this parameter. Nothing live is touched, and nothing is written by
guess: an operation that is not understood makes the checkpoint tensors that it
involves unsupported, with its name as the reason.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from loaders.engine.checkpoint import TORCH_DTYPE, Checkpoint
from loaders.engine.layout import Correspondence, Layout, compose
from loaders.engine.provenance import Provenance, Recorder, Region, key_of, region_of

_log = logging.getLogger(__name__)

_COPIES = frozenset({"aten::clone", "aten::_to_copy", "aten::contiguous"})
_SCALARS = 2
"""As many elements as what vLLM calls a scalar, or the shape of a packed weight."""
_FILLS = frozenset({"aten::zero_", "aten::fill_"})


@dataclass(frozen=True, slots=True)
class Traced:
    """What one pass of `load_weights` does with every checkpoint tensor."""

    regions: dict[str, tuple[Region, ...]]
    """Checkpoint tensor → its regions on this rank; may be empty."""
    refused: dict[str, str]
    """Checkpoint tensor → why its way could not be followed."""
    shared: dict[str, frozenset[str]] = field(default_factory=dict)
    """Checkpoint tensor → others that are loaded into some of the same elements, and so have to equal it."""
    constant: frozenset[str] = frozenset()
    """Checkpoint tensors that this rank replaces by a constant: vLLM zeroes a bias that another rank adds."""


def _nbytes(tensor: torch.Tensor) -> int:
    """Size of the whole storage."""
    return int(tensor.untyped_storage().nbytes())


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor)]


class _Trace(TorchDispatchMode):
    """Follows checkpoint tensors through whatever the loaders do with them."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        # Nothing is known of what goes into a parameter that has values, so it keeps those it was made with.
        unknown = schema.name == "aten::copy_" and args[1].is_meta and not args[0].is_meta
        out = args[0] if unknown else func(*args, **kwargs)
        if schema.is_mutable:
            self._write(schema, args, kwargs)
        else:
            self._derive(schema.name, _tensors((args, kwargs)), _tensors(out))
        return out

    def _derive(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """New storages carry the provenance of what they were made from; views share theirs."""
        known = {key_of(tensor) for tensor in inputs}
        made = [tensor for tensor in outputs if key_of(tensor) not in known]
        involved = [p for tensor in inputs if (p := self._recorder.provenance(tensor))] if made else []
        if not involved:
            return
        for tensor in made:
            self._recorder.keep.append(tensor)
            self._recorder.sources[key_of(tensor)] = _made_by(name, inputs, involved, tensor)

    def _write(self, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Every operation that writes: a copy is a region, a fill is a constant, others are not followed."""
        values = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        written = _tensors(
            [
                values.get(argument.name)
                for argument in schema.arguments
                if argument.alias_info and argument.alias_info.is_write
            ]
        )
        read = _tensors(args[1:] if schema.name == "aten::copy_" else values)
        for target in written:
            parameter = self._recorder.parameters.get(key_of(target))
            if parameter is None:
                self._write_elsewhere(schema.name, target, read)
            elif schema.name == "aten::copy_":
                self._copy(*parameter, target, args[1])
            else:
                self._recorder.overwritten(parameter[0], target)
                if schema.name not in _FILLS:
                    for tensor in read:
                        self._refuse(tensor, f"written by {schema.name} while loading")

    def _refuse(self, tensor: torch.Tensor, reason: str) -> None:
        provenance = self._recorder.provenance(tensor)
        if provenance is not None:
            self._recorder.refuse(provenance.tensors, reason)

    def _write_elsewhere(self, name: str, target: torch.Tensor, read: list[torch.Tensor]) -> None:
        """A loader changed its source (zeroed a bias that another rank adds) or keeps something aside."""
        found = [p for tensor in (target, *read) if (p := self._recorder.provenance(tensor))]
        involved = frozenset[str]().union(*(p.tensors for p in found))
        if key_of(target) not in self._recorder.sources:
            self._recorder.refuse(involved, "kept outside of the parameters while loading")
        if involved:
            self._recorder.keep.append(target)
            problem = f"changed by {name} while loading"
            constant = name in _FILLS and target.numel() * target.element_size() == _nbytes(target)
            self._recorder.sources[key_of(target)] = Provenance(involved, problem=problem, constant=constant)

    def _copy(self, name: str, parameter: torch.Tensor, target: torch.Tensor, source: torch.Tensor) -> None:
        if source.numel() == 0:
            return
        provenance = self._recorder.provenance(source)
        if provenance is not None and provenance.constant:
            self._recorder.constant |= provenance.tensors
        elif provenance is not None:
            try:
                region = region_of(name, parameter, target, source, provenance)
            except ValueError as error:
                self._recorder.refuse(provenance.tensors, str(error))
            else:
                self._recorder.regions[name].append(region)
                return
        self._recorder.overwritten(name, target)


def _made_by(
    name: str, inputs: list[torch.Tensor], involved: list[Provenance], made: torch.Tensor
) -> Provenance:
    tensors = frozenset[str]().union(*(p.tensors for p in involved))
    problems = [p.problem for p in involved if p.map is None]
    source = involved[0]
    if source.map is None or len(inputs) != 1 or name not in _COPIES:
        return Provenance(tensors, problem=problems[0] if problems else f"goes through {name} while loading")
    try:
        origin = compose(Layout.of(inputs[0]), source.map)
    except ValueError as error:
        return Provenance(tensors, problem=str(error))
    cast = () if made.dtype == source.dtypes[-1] else (made.dtype,)
    return Provenance(tensors, Correspondence(origin, Layout.of(made)), (*source.dtypes, *cast))


def trace(twin: nn.Module, checkpoint: Checkpoint) -> Traced:
    """Trace `twin.load_weights` over all checkpoint tensors in one pass.

    Loaders look at the values of scalars (vLLM's refuse input scales of gate and up that
    differ), so those of a few elements are read; of all others only the shape is known.

    A tensor at which the loader raises is refused with the loader's words and the
    pass repeated without it; if it raises when it has had them all, all are refused.
    """
    load: Any = twin.load_weights
    tensors = checkpoint.tensors
    refused: dict[str, str] = {}
    while True:
        recorder = Recorder(_parameter_storages(twin))
        left = [name for name in tensors if name not in refused]
        if not left:
            return Traced({}, refused)
        weights = _Weights(checkpoint, left, recorder)
        try:
            with torch.no_grad(), _Trace(recorder):
                load(weights)
        except Exception as error:  # loaders raise what they like; the tensor at hand is named
            blamed = weights.at_hand()
            if not blamed:
                raise
            _log.warning("loader refused %s: %s", ", ".join(blamed), error)
            reason = f"the engine's loader refused it: {type(error).__name__}: {error}"
            refused |= dict.fromkeys(blamed, reason)
            continue
        _refuse_replaced(twin, recorder)
        shared = recorder.shared()
        refused |= recorder.refused
        regions: dict[str, list[Region]] = {name: [] for name in tensors if name not in refused}
        for region in dict.fromkeys(r for found in recorder.regions.values() for r in found):
            if region.tensor in regions:
                regions[region.tensor].append(region)
        ways = {name: tuple(found) for name, found in regions.items()}
        return Traced(ways, refused, shared, frozenset(recorder.constant))


def _parameter_storages(twin: nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    """Storage → the first name of the parameter in it (tied parameters have one)."""
    storages: dict[int, tuple[str, torch.Tensor]] = {}
    for name, parameter in twin.named_parameters(remove_duplicate=False):
        storages.setdefault(key_of(parameter), (name, parameter))
    return storages


def _refuse_replaced(twin: nn.Module, recorder: Recorder) -> None:
    """A loader may also put its source, or something new, in the place of a parameter."""
    after = {name: key_of(parameter) for name, parameter in twin.named_parameters(remove_duplicate=False)}
    for key, (name, _) in recorder.parameters.items():
        if after.get(name) == key:
            continue
        owners = {region.tensor for region in recorder.regions[name]}
        source = recorder.sources.get(after.get(name, key))
        if source is not None:
            owners |= source.tensors
        recorder.refuse(owners, f"{name} is replaced while loading")


class _Weights(Iterator[tuple[str, torch.Tensor]]):
    """Every checkpoint tensor, on meta but for scalars, as the source of its own elements."""

    def __init__(self, checkpoint: Checkpoint, names: list[str], recorder: Recorder) -> None:
        self._checkpoint = checkpoint
        self._names = names
        self._left = iter(names)
        self._recorder = recorder
        self._current: str | None = None
        self._exhausted = False

    def __next__(self) -> tuple[str, torch.Tensor]:
        try:
            base = self._checkpoint.tensors[next(self._left)]
        except StopIteration:
            self._exhausted = True
            raise
        self._current = base.name
        dtype = TORCH_DTYPE[base.dtype]
        weight = (
            self._checkpoint.read(base.name).view(base.shape).clone()
            if base.numel <= _SCALARS
            else torch.empty(base.shape, dtype=dtype, device="meta")
        )
        self._recorder.keep.append(weight)
        whole = Correspondence(Layout.contiguous(base.shape), Layout.of(weight))
        self._recorder.sources[key_of(weight)] = Provenance(frozenset({base.name}), whole, (dtype,))
        return base.name, weight

    def at_hand(self) -> list[str]:
        """Names of the tensors that the loader may have stumbled over."""
        if self._exhausted:
            return self._names
        return [self._current] if self._current is not None else []
