"""Canvases: blocks of repacked parameters that dense writes are staged on, each to leave as one move.

The tensors of one expert land interleaved in one block. They are painted in the
parameter's own order, with strided copies, and go through the repacking table once,
when the block is complete. A block that is not covered leaves as single elements.
"""

from dataclasses import dataclass

import torch

from loaders.engine.layout import Correspondence, Layout
from loaders.engine.move import Move, Scatter
from loaders.engine.points import Points
from loaders.engine.spot import Spot


@dataclass(slots=True)
class _Canvas:
    """One block of a parameter; positions on it are the parameter's, counted from `begin`."""

    target: str
    spot: Spot
    begin: int
    values: torch.Tensor
    """Unset where nothing was painted."""
    covered: torch.Tensor | None = None
    """Where something was; none while that is nowhere, and once it is `whole`."""
    whole: bool = False

    def paint(self, part: Correspondence, values: torch.Tensor) -> None:
        place = Layout(part.dst.offset - self.begin, part.dst.size, part.dst.stride)
        place.view(self.values).copy_(part.src.view(values))
        self.whole |= part.dst.numel == self.values.numel()
        if not self.whole:
            place.view(self._mask()).fill_(True)

    def dot(self, elements: torch.Tensor, values: torch.Tensor) -> None:
        local = elements - self.begin
        self.values[local] = values
        if not self.whole:
            self._mask()[local] = True

    def _mask(self) -> torch.Tensor:
        if self.covered is None:
            self.covered = torch.zeros(self.values.numel(), dtype=torch.bool)
        return self.covered

    def move(self) -> Move:
        whole = self.whole or bool(self._mask().all())
        if self.spot.src_block == self.spot.dst_block and whole:
            place = Layout(self.begin, (self.spot.dst_block,), (1,))
            return Move(self.target, place, self.spot.repacked(self.values))
        local = torch.arange(self.values.numel()) if whole else self._mask().nonzero().squeeze(1)
        points = Points(local.numel(), self.spot.reach(self.begin + self.spot.src_block), self.values.dtype)
        points.add(self.spot.positions(local + self.begin), self.values[local])
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
            canvas = _Canvas(
                target,
                spot,
                block * spot.src_block,
                torch.empty(spot.src_block, dtype=values.dtype),
            )
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
        blocks = torch.div(elements, spot.src_block, rounding_mode="floor")
        left = torch.ones(elements.numel(), dtype=torch.bool)
        for index in blocks.unique().tolist():
            canvas = self._open.get((target, spot, index))
            if canvas is not None:
                inside = blocks == index
                canvas.dot(elements[inside], values[inside])
                left &= ~inside
        return elements[left], values[left]

    def moves(self) -> list[Move]:
        """All moves in the order in which they have to be made."""
        return [item.move() if isinstance(item, _Canvas) else item for item in self._order]
