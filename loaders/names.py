"""Names of checkpoint tensors: other spellings, the parts of expert names, and nearest known names."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

STREAMING = {
    "gate_up_proj": ("w13_weight",),
    "gate_up_proj_bias": ("w13_bias",),
    "gate_up_proj_blocks": ("w13_weight_packed", "w13_weight"),
    "gate_up_proj_scales": ("w13_weight_scale",),
    "down_proj": ("w2_weight",),
    "down_proj_bias": ("w2_bias",),
    "down_proj_blocks": ("w2_weight_packed", "w2_weight"),
    "down_proj_scales": ("w2_weight_scale",),
    "gate_up_proj.weight": ("w13_weight_packed", "w13_weight"),
    "gate_up_proj.weight_scale": ("w13_weight_scale",),
    "gate_up_proj.input_scale": ("w13_input_scale",),
    "gate_up_proj.bias": ("w13_bias",),
    "down_proj.weight": ("w2_weight_packed", "w2_weight"),
    "down_proj.weight_scale": ("w2_weight_scale",),
    "down_proj.input_scale": ("w2_input_scale",),
    "down_proj.bias": ("w2_bias",),
}
"""End of an expert tensor's checkpoint name → vLLM's streaming names for it, or for one expert's slice.

Names with a dot are Quark's, which has a tensor for each expert.
"""

_SCALES = ("_scales", "weight_scale", "weight_scale_inv")
"""Ends of names of what scales a packed weight: where they are bytes, exponents."""
_PARTS = (
    ("_blocks", "_scales"),
    (".weight_packed", ".weight_scale", ".weight_global_scale", ".weight_zero_point"),
    (".weight", ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_zero_point"),
    (".qweight", ".scales", ".qzeros"),
)
"""Ends of the names of a packed weight, its scales and zero points: none says anything without the others."""
_STACKS = ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight")
"""Ends of names of stacked expert tensors that do not say so (Granite)."""
_INSERTED = frozenset(("routed_experts", "base_layer"))
_NEIGHBOURS = 8
_NEAREST = 3


@dataclass(frozen=True)
class ExpertName:
    """A tensor name taken apart: all before the expert, the layer, the expert (none: all), the rest."""

    group: str
    layer: int
    expert: int | None
    last: str


def canonical(name: str) -> str:
    """The name without the parts that vLLM's refactors and adapters insert."""
    return ".".join(part for part in name.split(".") if part not in _INSERTED)


def is_scale(name: str) -> bool:
    """Whether the tensor of that name scales a packed weight."""
    return name.endswith(_SCALES)


def other_parts(name: str) -> list[str]:
    """How the weight, the scales and the zero points may be called that go with a tensor of that name."""
    return [
        name.removesuffix(end) + other
        for ends in _PARTS
        for end in ends
        if name.endswith(end)
        for other in ends
        if other != end
    ]


def parse_expert(name: str) -> ExpertName | None:
    """The parts of a canonical name that belongs to one expert or to a stack of them, else none."""
    if name.endswith(_STACKS):
        group, _, last = name.rpartition(".block_sparse_moe.")
        layer = _layer(group)
        return None if layer is None else ExpertName(f"{group}.block_sparse_moe", layer, None, last)
    group, found, rest = name.rpartition(".experts.")
    layer = _layer(group)
    if not found or layer is None:
        return None
    expert, dot, last = rest.partition(".")
    if dot and _is_number(expert) and last:
        return ExpertName(group + ".experts", layer, int(expert), last)
    if rest and not dot:
        return ExpertName(group + ".experts", layer, None, rest)
    return None


def _layer(group: str) -> int | None:
    """The number after the last part `layers`."""
    parts = group.split(".")
    for at in range(len(parts) - 2, -1, -1):
        if parts[at] == "layers":
            return int(parts[at + 1]) if _is_number(parts[at + 1]) else None
    return None


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) <= 6


class Nearest:
    """Finds known names like an unknown one without looking at all of them."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(names)
        self._reversed = sorted(name[::-1] for name in self._names)

    def to(self, name: str) -> list[str]:
        """At most three known names, best first: from those that share the longest start or end."""
        name = name[:256]
        matcher = SequenceMatcher(autojunk=False)
        matcher.set_seq2(name)
        scored = []
        for candidate in self._candidates(name):
            matcher.set_seq1(candidate)
            scored.append((matcher.ratio(), candidate))
        scored.sort(key=lambda pair: (-pair[0], pair[1]))
        return [candidate for score, candidate in scored[:_NEAREST] if score >= 0.5]

    def _candidates(self, name: str) -> set[str]:
        by_end = {found[::-1] for found in _around(self._reversed, name[::-1])}
        return by_end.union(_around(self._names, name))


def _around(names: list[str], name: str) -> Iterator[str]:
    at = bisect_left(names, name)
    yield from names[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]
