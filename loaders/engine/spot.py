"""Spots: where the elements of a parameter stand in a runtime tensor after processing.

Processing may leave a parameter as it was, or repack it by a fixed injection
(permutation with constant padding). The injection is learned by running the
processing on index codes, and is the same for every expert.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from loaders.engine.layout import Correspondence, Layout, quotients
from loaders.engine.move import WORDS
from loaders.engine.tiles import strided, through

_log = logging.getLogger(__name__)

_CODE_BITS = 32


class NotAnInjection(Exception):
    """The processing does not just move elements of this parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class Spot:
    """Element `i` of a parameter is element `position(i)` of the runtime tensor at `path`.

    Both are counted in row-major order. The map repeats every `src_block` elements,
    advancing by `dst_block` (an expert each); within a block it is `table`, or the
    identity if that is None.
    """

    path: str
    src_block: int
    dst_block: int
    table: torch.Tensor | None = None
    tiles: Layout | None = field(init=False)
    """The table as strides, where it is that regular, as kernels' orders mostly are: copies are fast then."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiles", None if self.table is None else strided(self.table))

    @property
    def is_identity(self) -> bool:
        """Whether the parameter stands in the runtime tensor as it is."""
        return self.table is None and self.src_block == self.dst_block

    def positions(self, elements: torch.Tensor) -> torch.Tensor:
        """Runtime positions of parameter elements, both int64 [n]."""
        if self.is_identity:
            return elements
        block = quotients(elements, self.src_block)
        return block * self.dst_block + self.within(elements - block * self.src_block)

    def within(self, elements: torch.Tensor) -> torch.Tensor:
        """Positions in a runtime block of elements of the parameter's block, both int64 [n]."""
        return elements if self.table is None else self.table[elements].to(torch.int64)

    def reach(self, elements: int) -> int:
        """One past the highest runtime position that the first `elements` of a parameter can have."""
        return -(-elements // self.src_block) * self.dst_block

    def lay(self, part: Correspondence, values: torch.Tensor, block: torch.Tensor) -> None:
        """Write `part.src` of flat `values` into a block of the runtime tensor, flat [dst_block].

        `part.dst` counts the elements of the parameter's block from its start.
        """
        place = self._place(part)
        if isinstance(place, Correspondence):
            place.dst.view(block).copy_(place.src.view(values))
        else:
            block[place] = part.src.view(values).reshape(-1)

    def _place(self, part: Correspondence) -> Correspondence | torch.Tensor:
        """The part led on into the runtime tensor's block, or its positions there."""
        if self.table is None:
            return part
        led = None if self.tiles is None else through(part, self.tiles)
        return led if led is not None else part.dst.view(self.table).reshape(-1)


def identity(path: str, numel: int) -> Spot:
    """The spot of a parameter that processing leaves alone."""
    return Spot(path, max(numel, 1), max(numel, 1))


Processing = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Parameters in, runtime tensors by path out."""


def learn_spots(
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]], blocks: int, process: Processing
) -> dict[str, list[Spot]]:
    """Learn where each parameter's elements go by processing index codes.

    Codes start at 1, so that constants (zero padding) read as 0. They are fed in as
    many passes as the dtype needs to carry 32 bits. `blocks` is the number of
    experts along the first dimension (1 without experts).

    A parameter of which elements are combined, dropped or duplicated has no spots.
    """
    bases: dict[str, int] = {}
    total = 0
    for name, (shape, _) in shapes.items():
        bases[name] = total
        total += _numel(shape)
    passes = max(1, *(_CODE_BITS // (8 * dtype.itemsize) for _, dtype in shapes.values()))
    seen = [
        process({name: _code(bases[name], shapes[name], step) for name in shapes}) for step in range(passes)
    ]
    found: dict[int, dict[str, torch.Tensor]] = {dtype.itemsize: {} for _, dtype in shapes.values()}
    for path, first in seen[0].items():
        # In words of another size nothing stands as it is, but what looks like a code may.
        if first.element_size() in found:
            found[first.element_size()][path] = _decode([tensors[path] for tensors in seen])
    return {
        name: _everywhere(found[dtype.itemsize], bases[name], _numel(shape), blocks)
        for name, (shape, dtype) in shapes.items()
    }


def _everywhere(found: dict[str, torch.Tensor], base: int, numel: int, blocks: int) -> list[Spot]:
    """The spots of one parameter; none if some tensor holds only a part of it."""
    try:
        spots = [_spot(path, codes, base, numel, blocks) for path, codes in found.items()]
    except NotAnInjection as reason:
        _log.debug("not an injection: %s", reason)
        return []
    return [spot for spot in spots if spot is not None]


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _code(base: int, spec: tuple[tuple[int, ...], torch.dtype], step: int) -> torch.Tensor:
    shape, dtype = spec
    bits = 8 * dtype.itemsize
    codes = torch.arange(base + 1, base + 1 + _numel(shape), dtype=torch.int64)
    part = (codes >> (bits * step)) & ((1 << bits) - 1) if bits * step < _CODE_BITS else codes * 0
    if bits < 64 and dtype.itemsize > 1:
        part = torch.where(part >= 1 << (bits - 1), part - (1 << bits), part)
    return part.to(WORDS[dtype.itemsize]).view(dtype).reshape(shape)


def _decode(parts: list[torch.Tensor]) -> torch.Tensor:
    bits = 8 * parts[0].element_size()
    codes = torch.zeros(parts[0].numel(), dtype=torch.int64)
    for step, part in enumerate(parts[: max(1, _CODE_BITS // bits)]):
        words = part.contiguous().reshape(-1).view(WORDS[part.element_size()]).to(torch.int64)
        codes |= (words & ((1 << min(bits, _CODE_BITS)) - 1)) << (bits * step)
    return codes


def _spot(path: str, codes: torch.Tensor, base: int, numel: int, blocks: int) -> Spot | None:
    standing = ((codes > base) & (codes <= base + numel)).nonzero().squeeze(1)
    if standing.numel() == 0:
        return None
    if standing.numel() != numel:
        raise NotAnInjection(f"{path} holds {standing.numel()} of {numel} elements")
    table = torch.full((numel,), -1, dtype=torch.int64)
    table[codes[standing] - base - 1] = standing
    if bool((table < 0).any()):
        raise NotAnInjection(f"{path} holds some elements twice")
    if numel % blocks or codes.numel() % blocks:
        raise NotAnInjection(f"{path} is not made of {blocks} blocks")
    src_block, dst_block = numel // blocks, codes.numel() // blocks
    first = table[:src_block]
    steps = torch.arange(blocks).repeat_interleave(src_block) * dst_block
    if not bool(torch.equal(table, first.repeat(blocks) + steps)):
        raise NotAnInjection(f"{path} treats experts differently")
    if bool(torch.equal(first, torch.arange(src_block))):
        return Spot(path, src_block, dst_block)
    return Spot(path, src_block, dst_block, first.to(torch.int32))
