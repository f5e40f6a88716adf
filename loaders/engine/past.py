"""The past: what a rank holds to step back from each of its versions to the one before.

Parameters are put back from the elements that were overwritten. What is made from them is made anew, but
for the last change: what that has replaced is still there, and is exchanged again.
"""

from collections.abc import Container
from dataclasses import dataclass

from loaders.engine.move import Move, compacted
from loaders.engine.prepared import Applied
from loaders.engine.rebuild import Spare
from schemas.problems import Code, ProblemError


@dataclass(frozen=True, slots=True)
class _Replaced:
    """What the change that made `version` has replaced of what is made from parameters."""

    version: int
    spares: tuple[Spare, ...]


class Past:
    """Undo by version, in memory alone; `parameters` are the targets that it consists of."""

    def __init__(self, parameters: Container[str]) -> None:
        self._parameters = parameters
        self._undo: dict[int, list[Move]] = {}
        self._replaced: _Replaced | None = None

    def add(self, version: int, applied: Applied) -> None:
        """Keep what leads back from `version`, which `applied` has made."""
        prepared = applied.prepared
        # Of each move its own: what is derived may stand where a parameter of its name stood.
        old = dict(zip(map(id, prepared.moves), prepared.undo or (), strict=True))
        spares = tuple(spare.back(old) for spare in prepared.spares)
        self._undo[version] = compacted([move for move in applied.undo() if move.target in self._parameters])
        self._replaced = _Replaced(version, spares)

    def take_back(self, version: int) -> None:
        """`version` has never been."""
        self._undo.pop(version, None)  # there is none of a replay
        self._replaced = None

    def forget(self, versions: tuple[int, ...]) -> None:
        """Drop what leads back from these versions."""
        for version in versions:
            self._undo.pop(version, None)
        replaced = self._replaced
        if replaced is not None and replaced.version in versions:
            self._replaced = None

    def back(self, now: int, version: int) -> list[Move]:
        """The moves that lead from version `now` to an earlier one.

        Raises ProblemError if some of them are not held.
        """
        steps = range(now, version, -1)
        missing = [step for step in steps if step not in self._undo]
        if version > now or missing:
            raise ProblemError(Code.VERSION_NOT_HELD, f"undo of versions {missing} is not held")
        return compacted([move for step in steps for move in self._undo[step]])

    def spares(self, now: int, version: int) -> tuple[Spare, ...] | None:
        """Spares that lead from version `now` to the one before, if that is `version` and they are there."""
        replaced = self._replaced
        if replaced is None or (replaced.version, replaced.version - 1) != (now, version):
            return None
        return replaced.spares

    def make_room(self) -> None:
        """Drop what the last change has replaced: other spares take the place of it."""
        self._replaced = None

    def nbytes(self) -> dict[int, int]:
        """Bytes of undo by version."""
        return {version: sum(move.held_nbytes for move in moves) for version, moves in self._undo.items()}

    @property
    def replaced_nbytes(self) -> int:
        """Bytes of what the last change has replaced."""
        replaced = self._replaced  # jobs drop it in threads of their own
        return sum(spare.held_nbytes for spare in replaced.spares) if replaced else 0
