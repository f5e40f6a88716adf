"""Room for undo on the engine: what is forgotten to make some, and what never is."""

import contextlib

from app.engine import EngineClient
from app.ledger import Ledger
from schemas.problems import Code, ProblemError


class UndoRoom:
    """Keeps the undo that the engine holds within `budget` bytes per rank, oldest out first."""

    def __init__(self, client: EngineClient, ledger: Ledger, budget: int) -> None:
        self._client = client
        self._ledger = ledger
        self._budget = budget

    @property
    def used(self) -> int:
        """Bytes held per rank."""
        return sum(self._ledger.undo.values())

    def room(self, restoring: int | None = None) -> int:
        """Bytes per rank beside what baselines need; `restoring` as in `make`."""
        undo = self._ledger.undo
        return self._budget - sum(n for v, n in undo.items() if v > self._ledger.forgettable(restoring))

    async def make(self, needed: int, restoring: int | None = None) -> None:
        """Make room for `needed` bytes more, as far as can be before the change.

        `restoring` is the version that is being rolled back to: its way back has to stay
        until the rollback is done, and may then make room for the rollback's own undo,
        so that going back is never impossible for want of undo.
        Raises undo_budget, with nothing forgotten, if baselines leave too little.
        """
        lasting = self._budget - self.room(restoring)
        if lasting + needed > self._budget:
            detail = f"{needed} bytes of undo are needed; {lasting} of {self._budget} are kept for baselines."
            raise ProblemError(Code.UNDO_BUDGET, detail, needed=needed, kept=lasting, budget=self._budget)
        last = self._ledger.forgettable()
        if restoring is not None:
            last = min(last, self._ledger.nearest(restoring))
        await self._forget(last, needed)

    async def trim(self) -> None:
        """Come back within the budget after a rollback, if the engine listens."""
        with contextlib.suppress(ProblemError):  # the next change sees what is held and tries again
            await self._forget(self._ledger.forgettable(), 0)

    async def _forget(self, last: int, needed: int) -> None:
        """Forget the oldest undo up to that of version `last` until `needed` bytes fit."""
        gone: list[int] = []
        for version in sorted(self._ledger.undo):
            if version > last or self.used + needed <= self._budget:
                break
            del self._ledger.undo[version]
            gone.append(version)
        if gone:
            await self._client.forget(gone)
