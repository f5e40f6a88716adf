"""Prepared work: everything a commit will move, ready in memory, and how it is taken back."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from loaders.engine.failpoints import Failpoints
from loaders.engine.hands import Hands
from loaders.engine.move import Move

if TYPE_CHECKING:
    from loaders.engine.rebuild import Spare


class NoWayBack(Exception):
    """What a commit overwrote was not kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Moves and spare handles of one transaction on this rank."""

    key: str
    base_version: int
    moves: tuple[Move, ...]
    undo: tuple[Move, ...] | None
    """What `moves` will overwrite, in their order: weights change by commits alone, so it is known before.
    None if there will be no way back."""
    spares: "tuple[Spare, ...]"
    tensors: int
    elements: int
    digest: str | None

    @property
    def nbytes(self) -> int:
        """Bytes that the commit writes."""
        return sum(move.nbytes for move in self.moves)

    @property
    def held_nbytes(self) -> int:
        """Bytes that keeping this takes."""
        moves = sum(move.held_nbytes for move in self.moves)
        undo = sum(move.nbytes for move in self.undo or ())  # which shares the places of the moves
        return moves + undo + sum(spare.nbytes for spare in self.spares)


def taken(moves: Iterable[Move], targets: Mapping[str, torch.Tensor]) -> tuple[Move, ...]:
    """The moves that put back what the targets hold now.

    All is taken before anything is written: tied targets are one memory under several names, and the undo
    of each of them by itself has to lead back to what it was.
    """
    return tuple(move.taken_from(targets[move.target]) for move in moves)


@dataclass(slots=True, eq=False)
class Applied:
    """A commit in the making: what it may have overwritten, to be put back in reverse order."""

    prepared: Prepared
    targets: dict[str, torch.Tensor]
    hands: Hands
    begun: bool = False
    taken: list[Move] = field(default_factory=list)
    exchanged: "list[Spare]" = field(default_factory=list)

    def apply(self, failpoints: Failpoints) -> None:
        """Write all moves and exchange all handles.

        Raises whatever goes wrong; `revert` then puts back what had been overwritten.
        """
        failpoints.reach("apply.before")
        middle = len(self.prepared.moves) // 2
        self.taken.extend(self.prepared.undo or ())
        self.begun = bool(self.prepared.moves or self.prepared.spares)
        self.hands.write(self.prepared.moves[:middle], self.targets)
        failpoints.reach("apply.middle")
        self.hands.write(self.prepared.moves[middle:], self.targets)
        for spare in self.prepared.spares:
            spare.exchange()
            self.exchanged.append(spare)
        failpoints.reach("apply.after")

    def revert(self) -> None:
        """Put back everything, newest first; may be called again after it failed.

        Raises NoWayBack if something was written and nothing kept for it.
        """
        if self.begun and self.prepared.undo is None:
            raise NoWayBack("it was prepared without undo")
        while self.exchanged:
            self.exchanged[-1].exchange()
            self.exchanged.pop()
        while self.taken:
            move = self.taken[-1]
            move.write(self.targets[move.target])
            self.taken.pop()

    def undo(self) -> list[Move]:
        """The moves that step back from this commit, in the order in which they are made."""
        return list(reversed(self.taken))
