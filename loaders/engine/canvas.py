"""Canvases: blocks of repacked parameters that dense writes are staged on, each to leave as one move.

The tensors of one expert land interleaved in one block. They are painted in the order of the
runtime tensor, with strided copies straight from the files. A block that is not covered leaves
as single elements.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from loaders.engine.layout import Correspondence, Layout, quotients
from loaders.engine.move import Move, Scatter
from loaders.engine.points import Points
from loaders.engine.spot import Spot

_INT16_LIMIT = 2**15


@dataclass(slots=True)
class _Canvas:
    """Block number `index` of a parameter."""

    target: str
    spot: Spot
    index: int
    values: torch.Tensor
    """In the order of the runtime tensor, unset where nothing was painted."""
    covered: torch.Tensor | None = None
    """Where in the parameter's own order something was; none while nowhere, no matter once it is `whole`."""
    whole: bool = False

    @property
    def begin(self) -> int:
        """The block's first position in the parameter."""
        return self.index * self.spot.src_block

    @property
    def stands(self) -> int:
        """The block's first position in the runtime tensor."""
        return self.index * self.spot.dst_block

    def paint(self, part: Correspondence, values: torch.Tensor) -> None:
        place = Layout(part.dst.offset - self.begin, part.dst.size, part.dst.stride)
        self.spot.lay(Correspondence(part.src, place), values, self.values)
        self.whole |= place.numel == self.spot.src_block
        if not self.whole:
            place.view(self._mask()).fill_(True)

    def dot(self, elements: torch.Tensor, values: torch.Tensor) -> None:
        local = elements - self.begin
        self.values[self.spot.within(local)] = values
        if not self.whole:
            self._mask()[local] = True

    def _mask(self) -> torch.Tensor:
        if self.covered is None:
            self.covered = torch.zeros(self.spot.src_block, dtype=torch.bool)
        return self.covered

    def move(self) -> Move:
        whole = self.whole or bool(self._mask().all())
        if self.spot.src_block == self.spot.dst_block and whole:
            return Move(self.target, Layout(self.stands, (self.spot.dst_block,), (1,)), self.values)
        local = torch.arange(self.spot.src_block) if whole else self._mask().nonzero().squeeze(1)
        within = self.spot.within(local)
        points = Points(local.numel(), self.stands + self.spot.dst_block, self.values.dtype)
        points.add(within + self.stands, self.values[within])
        return scattered(self.target, points)


def scattered(target: str, points: Points) -> Move:
    """The move of single elements, which uses them up."""
    positions, values = points.sorted()
    return Move(target, Scatter(positions), values)


class Canvases:
    """Collects moves in order; writes to a block that is on a canvas go onto the canvas.

    Parameters that share a target have canvases of their own: they share no element.
    """

    def __init__(self) -> None:
        self._order: list[Move | _Canvas] = []
        self._open: dict[tuple[str, Spot, int], _Canvas] = {}
        self._painted: set[tuple[str, Spot]] = set()

    def put(self, move: Move) -> None:
        """A move that stands as it is."""
        self._order.append(move)

    def paint(self, target: str, spot: Spot, part: Correspondence, values: torch.Tensor) -> None:
        """Dense values: `part.src` in `values` goes to `part.dst` in the parameter, within one block."""
        block = part.dst.offset // spot.src_block
        canvas = self._open.get((target, spot, block))
        if canvas is None:
            canvas = _Canvas(target, spot, block, torch.empty(spot.dst_block, dtype=values.dtype))
            self._open[target, spot, block] = canvas
            self._painted.add((target, spot))
            self._order.append(canvas)
        canvas.paint(part, values)

    def dot(
        self, target: str, spot: Spot, elements: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Single elements anywhere in the parameter, int64 [n], onto their canvases; those that have none."""
        if (target, spot) not in self._painted:
            return elements, values
        left = [torch.empty(0, dtype=torch.int64)]
        for block, chosen in _by_block(quotients(elements, spot.src_block)):
            canvas = self._open.get((target, spot, block))
            if canvas is None:
                left.append(chosen)
            else:
                canvas.dot(elements[chosen], values[chosen])
        rest = torch.cat(left)
        return elements[rest], values[rest]

    def moves(self) -> list[Move]:
        """All moves in the order in which they have to be made."""
        return [item.move() if isinstance(item, _Canvas) else item for item in self._order]


def _by_block(blocks: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Every block that occurs in `blocks`, int64 [n], and where, in the order in which it does."""
    numbers = blocks.numpy()
    if numbers.size and numbers.max() < _INT16_LIMIT:
        numbers = numbers.astype(np.int16)  # which numpy sorts by counting
    order = np.argsort(numbers, kind="stable")
    edges = np.flatnonzero(np.diff(numbers[order])) + 1
    for chosen in np.split(order, edges):
        if chosen.size:
            yield int(numbers[chosen[0]]), torch.from_numpy(chosen)
