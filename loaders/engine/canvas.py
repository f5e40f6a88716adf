"""Canvases: blocks of repacked tensors that dense writes are staged on in kernel order.

The tensors of one expert land interleaved in one block. Painted together, they leave
as one contiguous move; a block that is not covered leaves as single elements.
"""

from dataclasses import dataclass

import torch

from loaders.engine.layout import Layout
from loaders.engine.move import Move, Scatter


@dataclass(slots=True)
class _Canvas:
    target: str
    begin: int
    values: torch.Tensor
    covered: torch.Tensor

    def paint(self, positions: torch.Tensor, values: torch.Tensor) -> None:
        local = positions.to(torch.int64) - self.begin
        self.values[local] = values
        self.covered[local] = True

    def move(self) -> Move:
        if bool(self.covered.all()):
            place = Layout(self.begin, (self.values.numel(),), (1,))
            return Move(self.target, place, self.values)
        local = self.covered.nonzero().squeeze(1)
        return Move(self.target, Scatter((local + self.begin).to(_index_dtype(self))), self.values[local])


def _index_dtype(canvas: _Canvas) -> torch.dtype:
    return torch.int32 if canvas.begin + canvas.values.numel() < 2**31 else torch.int64


class Canvases:
    """Collects moves in order; writes to a block that is on a canvas go onto the canvas."""

    def __init__(self) -> None:
        self._order: list[Move | _Canvas] = []
        self._open: dict[tuple[str, int], _Canvas] = {}
        self._painted: set[str] = set()

    def put(self, move: Move) -> None:
        """A move that stands as it is."""
        self._order.append(move)

    def paint(self, target: str, block: int, positions: torch.Tensor, values: torch.Tensor) -> None:
        """Dense values for positions that all lie in one block of `block` elements."""
        key = (target, int(positions[0]) // block)
        if key not in self._open:
            canvas = _Canvas(
                target,
                key[1] * block,
                torch.zeros(block, dtype=values.dtype),
                torch.zeros(block, dtype=torch.bool),
            )
            self._open[key] = canvas
            self._painted.add(target)
            self._order.append(canvas)
        self._open[key].paint(positions, values)

    def scatter(self, target: str, block: int, positions: torch.Tensor, values: torch.Tensor) -> None:
        """Single elements anywhere in the target."""
        if target in self._painted:
            positions, values = self._onto_canvases(target, block, positions, values)
        if positions.numel():
            self._order.append(Move(target, Scatter(positions), values))

    def _onto_canvases(
        self, target: str, block: int, positions: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = torch.div(positions, block, rounding_mode="floor")
        left = torch.ones(positions.numel(), dtype=torch.bool)
        for index in blocks.unique().tolist():
            canvas = self._open.get((target, index))
            if canvas is not None:
                inside = blocks == index
                canvas.paint(positions[inside], values[inside])
                left &= ~inside
        return positions[left], values[left]

    def moves(self) -> list[Move]:
        """All moves in the order in which they have to be made."""
        return [item.move() if isinstance(item, _Canvas) else item for item in self._order]
