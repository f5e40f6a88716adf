"""What can be uploaded: names → places in checkpoint coordinates, for one model."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loaders.names import STREAMING, ExpertName, Nearest, canonical, parse_expert
from loaders.refusal import unknown_names
from loaders.shapes import flat_blocks, same_elements
from schemas.model import CheckpointTensor, ExpertTensor, ModelInfo
from schemas.problems import Code, ProblemError


@dataclass(frozen=True)
class Place:
    """Where values go: a whole checkpoint tensor, or slice `tensor[expert]` of one that stacks experts."""

    tensor: CheckpointTensor
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether values of that shape are the place's elements in its order."""
        return same_elements(shape, self.shape) or flat_blocks(shape, self.shape, self.tensor.dtype)


@dataclass(frozen=True)
class ExpertSlot:
    """One tensor of an expert: how uploads name it, and where it goes."""

    upload: ExpertTensor
    place: Place


class ExpertLayout:
    """The tensors that make up one expert; `slots` are sorted by their upload name."""

    def __init__(self, layer: int, expert: int, slots: Iterable[ExpertSlot]) -> None:
        self.layer = layer
        self.expert = expert
        self.slots = tuple(sorted(slots, key=lambda slot: slot.upload.name))
        self._by_name = {
            name: slot for slot in self.slots for name in (slot.upload.name, *slot.upload.aliases)
        }

    def find(self, name: str) -> ExpertSlot | None:
        """The tensor that an upload calls `name`, by any alias."""
        return self._by_name.get(name) or self._by_name.get(canonical(name))

    def nearest(self, name: str) -> list[str]:
        """Known names like an unknown one."""
        return Nearest(self._by_name).to(name) or [slot.upload.name for slot in self.slots]


class Catalogue:
    """All tensors of a checkpoint by name, and its experts by layer and number; never changes."""

    def __init__(self, tensors: tuple[CheckpointTensor, ...], info: ModelInfo) -> None:
        self.info = info
        self._tensors = sorted(tensors, key=lambda tensor: tensor.name)
        self._names = [tensor.name for tensor in self._tensors]
        self._by_name = {tensor.name: tensor for tensor in self._tensors}
        self._canonical = {canonical(tensor.name): tensor for tensor in reversed(self._tensors)}
        self._nearest = Nearest(self._names)
        self._stacks: dict[int, list[tuple[ExpertName, CheckpointTensor]]] = {}
        self._singles: dict[tuple[int, int | None], list[tuple[ExpertName, CheckpointTensor]]] = {}
        self._groups: dict[int, str] = {}
        self._within: set[str] = set()
        for tensor in self._tensors:
            self._add_expert(tensor)
        self._layers = sorted(self._groups)

    def find(self, name: str) -> CheckpointTensor | None:
        """The checkpoint tensor of that name, old or new spelling."""
        return self._by_name.get(name) or self._canonical.get(canonical(name))

    def resolve(self, name: str) -> CheckpointTensor:
        """As `find`. Raises `unknown_tensor` with the nearest known names."""
        found = self.find(name)
        if found is None:
            raise self.unknown([name])
        return found

    def place(self, name: str) -> Place | None:
        """A whole tensor, or one expert's slice by a streaming name such as `….experts.3.w13_weight`.

        Without a number a streaming name is the stack, as where vLLM itself has it.
        """
        tensor = self.find(name)
        if tensor is not None:
            return Place(tensor)
        parts = parse_expert(canonical(name))
        if parts is None or (parts.expert or 0) >= self.info.experts:
            return None
        for stack, tensor in self._stacks.get(parts.layer, ()):
            if stack.group == parts.group and parts.last in (stack.last, *STREAMING.get(stack.last, ())):
                return Place(tensor, parts.expert)
        for single, tensor in self._singles.get((parts.layer, parts.expert), ()):
            if single.group == parts.group and parts.last in STREAMING.get(single.last, ()):
                return Place(tensor)
        return None

    def unknown(self, names: Sequence[str]) -> ProblemError:
        """The refusal of names that the checkpoint lacks, each with the nearest known ones."""
        return unknown_names(names, self._nearest.to)

    def within_expert(self, name: str) -> bool:
        """Whether an expert's own upload calls a tensor so, without layer and expert."""
        return canonical(name) in self._within

    def experts(self, layer: int, expert: int) -> ExpertLayout:
        """The tensors of one expert. Raises `unknown_expert`."""
        slots = [
            *(self._stack_slot(parts, tensor, expert) for parts, tensor in self._stacks.get(layer, ())),
            *(_single_slot(parts, tensor) for parts, tensor in self._singles.get((layer, expert), ())),
        ]
        if not slots or not 0 <= expert < self.info.experts:
            raise self._unknown_expert(layer, expert)
        return ExpertLayout(layer, expert, slots)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have experts, ascending."""
        return tuple(self._layers)

    def expert_group(self, layer: int) -> str:
        """What the names of that layer's experts have in common, as `parse_expert` tells it."""
        return self._groups[layer]

    def tensors(self, prefix: str = "", after: str = "") -> list[CheckpointTensor]:
        """Tensors whose names start with `prefix` and come after `after`, sorted by name."""
        begin = bisect_left(self._names, max(prefix, after + "\0" if after else ""))
        end = bisect_left(self._names, prefix + "\U0010ffff") if prefix else len(self._names)
        return self._tensors[begin:end]

    def _add_expert(self, tensor: CheckpointTensor) -> None:
        """Note a tensor that belongs to experts; in each layer only the first group by name counts.

        (A draft model's layers are numbered again from 0 under another prefix.)
        """
        parts = parse_expert(canonical(tensor.name))
        if parts is None or self.info.experts < 1:
            return
        if parts.expert is None and (not tensor.shape or tensor.shape[0] != self.info.experts):
            return
        if self._groups.setdefault(parts.layer, parts.group) != parts.group:
            return
        self._within.update((parts.last, *STREAMING.get(parts.last, ())))
        if parts.expert is None:
            self._stacks.setdefault(parts.layer, []).append((parts, tensor))
        else:
            self._singles.setdefault((parts.layer, parts.expert), []).append((parts, tensor))

    def _stack_slot(self, parts: ExpertName, tensor: CheckpointTensor, expert: int) -> ExpertSlot:
        streaming = STREAMING.get(parts.last, ())
        prefix = f"{parts.group}.{expert}."
        aliases = (tensor.name, *streaming, *(prefix + name for name in (parts.last, *streaming)))
        upload = ExpertTensor(name=parts.last, dtype=tensor.dtype, shape=tensor.shape[1:], aliases=aliases)
        return ExpertSlot(upload, Place(tensor, expert))

    def _unknown_expert(self, layer: int, expert: int) -> ProblemError:
        if not self._layers:
            why = "The model has no experts."
        elif layer not in self._groups:
            why = f"Layer {layer} has no experts; layers {self._layers[0]} to {self._layers[-1]} do."
        else:
            why = f"Layer {layer} has experts 0 to {self.info.experts - 1}, not {expert}."
        return ProblemError(Code.UNKNOWN_EXPERT, why, layer=layer, expert=expert, experts=self.info.experts)


def _single_slot(parts: ExpertName, tensor: CheckpointTensor) -> ExpertSlot:
    streaming = STREAMING.get(parts.last, ())
    full = (f"{parts.group}.{parts.expert}.{name}" for name in streaming)
    aliases = (tensor.name, canonical(tensor.name), *streaming, *full)
    upload = ExpertTensor(name=parts.last, dtype=tensor.dtype, shape=tensor.shape, aliases=aliases)
    return ExpertSlot(upload, Place(tensor))
