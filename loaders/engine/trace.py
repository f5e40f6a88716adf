"""One pass of vLLM's own `load_weights` over meta tensors, recorded as regions.

Views keep their geometry on meta, copies are followed, and a `copy_` into a twin
parameter becomes a region: these elements of that checkpoint tensor go to those
elements of this parameter. Nothing live is touched, and nothing is written by
guess: an operation that is not understood makes the checkpoint tensors that it
involves unsupported, with its name as the reason.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from loaders.engine.checkpoint import TORCH_DTYPE, BaseTensor
from loaders.engine.layout import Correspondence, Layout, compose

_log = logging.getLogger(__name__)

_COPIES = frozenset({"aten::clone", "aten::_to_copy", "aten::contiguous"})
_FILLS = frozenset({"aten::zero_", "aten::fill_"})


@dataclass(frozen=True, slots=True)
class Region:
    """Elements of one checkpoint tensor and where they go in one twin parameter.

    `map.src` is in flat row-major positions of the checkpoint tensor, `map.dst` in
    positions of the parameter's storage, both in elements.
    """

    tensor: str
    parameter: str
    map: Correspondence
    src_dtype: torch.dtype
    dst_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Traced:
    """What one pass of `load_weights` does with every checkpoint tensor."""

    regions: dict[str, tuple[Region, ...]]
    """Checkpoint tensor → its regions on this rank, in the order of loading; may be empty."""
    refused: dict[str, str]
    """Checkpoint tensor → why its way could not be followed."""


@dataclass(slots=True)
class _Provenance:
    """What a storage that is not a parameter's holds."""

    tensors: frozenset[str]
    map: Correspondence | None = None
    """Own layout (dst) ← flat positions of the one checkpoint tensor (src)."""
    dtype: torch.dtype | None = None
    problem: str | None = None


@dataclass(slots=True)
class _Recorder:
    parameters: dict[int, tuple[str, torch.Tensor]]
    sources: dict[int, _Provenance] = field(default_factory=dict)
    regions: dict[str, list[Region]] = field(default_factory=lambda: defaultdict(list))
    refused: dict[str, str] = field(default_factory=dict)
    keep: list[torch.Tensor] = field(default_factory=list)
    """Keeps storages alive: their addresses are the keys above."""

    def refuse(self, tensors: frozenset[str], reason: str) -> None:
        for name in tensors:
            self.refused.setdefault(name, reason)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Trace(TorchDispatchMode):
    """Follows checkpoint tensors through whatever the loaders do with them."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        schema = func._schema
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        written = [
            value
            for value, argument in zip(args, schema.arguments, strict=False)
            if isinstance(value, torch.Tensor) and argument.alias_info and argument.alias_info.is_write
        ]
        if written:
            self._write(schema.name, written, inputs, args)
        else:
            self._derive(schema.name, inputs, out)
        return out

    def _derive(self, name: str, inputs: list[torch.Tensor], out: Any) -> None:
        """New storages carry the provenance of what they were made from."""
        known = {_key(tensor) for tensor in inputs}
        involved = [p for key in known if (p := self._recorder.sources.get(key))]
        if not involved:
            return
        for tensor in tree_flatten(out)[0]:
            if not isinstance(tensor, torch.Tensor) or _key(tensor) in known:
                continue
            self._recorder.keep.append(tensor)
            self._recorder.sources[_key(tensor)] = self._made_by(name, inputs, involved, tensor)

    def _made_by(
        self, name: str, inputs: list[torch.Tensor], involved: list[_Provenance], made: torch.Tensor
    ) -> _Provenance:
        tensors = frozenset().union(*(p.tensors for p in involved))
        source = involved[0]
        if name in _COPIES and len(inputs) == 1 and source.map is not None:
            if made.dtype != source.dtype:
                return _Provenance(tensors, problem=f"cast to {made.dtype} while loading")
            try:
                origin = compose(Layout.of(inputs[0]), source.map)
            except ValueError as error:
                return _Provenance(tensors, problem=str(error))
            return _Provenance(tensors, Correspondence(origin, Layout.of(made)), made.dtype)
        return _Provenance(tensors, problem=source.problem or f"goes through {name} while loading")

    def _write(
        self, name: str, written: list[torch.Tensor], inputs: list[torch.Tensor], args: tuple[Any, ...]
    ) -> None:
        involved = frozenset().union(
            *(p.tensors for t in inputs if (p := self._recorder.sources.get(_key(t))) is not None)
        )
        for target in written:
            parameter = self._recorder.parameters.get(_key(target))
            if parameter is None:
                self._write_source(name, target, involved)
            elif name == "aten::copy_":
                self._copy(parameter[0], target, args[1])
            elif name not in _FILLS:
                self._recorder.refuse(involved, f"written by {name} while loading")

    def _write_source(self, name: str, target: torch.Tensor, involved: frozenset[str]) -> None:
        """A loader changed its source (for example zeroed a bias that another rank adds)."""
        if involved:
            tensors = involved
            self._recorder.sources[_key(target)] = _Provenance(
                tensors, problem=f"changed by {name} while loading"
            )

    def _copy(self, parameter: str, target: torch.Tensor, source: torch.Tensor) -> None:
        provenance = self._recorder.sources.get(_key(source))
        if provenance is None:
            return
        if provenance.map is None or len(provenance.tensors) != 1:
            self._recorder.refuse(provenance.tensors, provenance.problem or "mixed while loading")
            return
        try:
            expanded = source.expand_as(target)
            origin = compose(Layout.of(source), provenance.map)
        except (ValueError, RuntimeError) as error:
            self._recorder.refuse(provenance.tensors, str(error))
            return
        if expanded.shape != source.shape:
            self._recorder.refuse(provenance.tensors, "broadcast while loading")
            return
        (name,) = provenance.tensors
        self._recorder.regions[name].append(
            Region(
                tensor=name,
                parameter=parameter,
                map=Correspondence(origin, Layout.of(target)),
                src_dtype=source.dtype,
                dst_dtype=target.dtype,
            )
        )


def trace(twin: nn.Module, tensors: dict[str, BaseTensor]) -> Traced:
    """Trace `twin.load_weights` over all checkpoint tensors in one pass.

    A tensor at which the loader raises is refused with the loader's words and the
    pass repeated without it.
    """
    refused: dict[str, str] = {}
    while True:
        recorder = _Recorder(_parameter_storages(twin))
        progress: list[str] = []
        try:
            with torch.no_grad(), _Trace(recorder):
                twin.load_weights(_meta_weights(tensors, refused, recorder, progress))
        except Exception as error:  # loaders raise what they like; the tensor at hand is named
            if not progress:
                raise
            refused[progress[-1]] = f"the engine's loader refused it: {type(error).__name__}: {error}"
            _log.warning("loader refused %s: %s", progress[-1], error)
            continue
        refused |= recorder.refused
        regions = {name: tuple(recorder.regions.get(name, ())) for name in tensors if name not in refused}
        return Traced(regions, refused)


def _parameter_storages(twin: nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    """Storage → the first name of the parameter in it (tied parameters have one)."""
    storages: dict[int, tuple[str, torch.Tensor]] = {}
    for name, parameter in twin.named_parameters(remove_duplicate=False):
        storages.setdefault(_key(parameter), (name, parameter))
    return storages


def _meta_weights(
    tensors: dict[str, BaseTensor], refused: dict[str, str], recorder: _Recorder, progress: list[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every checkpoint tensor on meta, as the source of its own elements."""
    for name, base in tensors.items():
        if name in refused:
            continue
        progress.append(name)
        dtype = TORCH_DTYPE[base.dtype]
        weight = torch.empty(base.shape, dtype=dtype, device="meta")
        recorder.keep.append(weight)
        whole = Correspondence(Layout.contiguous(base.shape), Layout.of(weight))
        recorder.sources[_key(weight)] = _Provenance(frozenset({name}), whole, dtype)
        yield name, weight
