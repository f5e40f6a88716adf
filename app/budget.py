"""Room for staged bytes, shared by all uploads."""

from schemas.problems import Code, ProblemError


class StagedBudget:
    """Counts staged bytes against a limit. Used from the event loop only, so it needs no lock."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        """Bytes of files on disk and of bodies that are being received."""

    def reserve(self, nbytes: int) -> None:
        """Take room for `nbytes` more. Raises `staged_budget` and takes nothing if there is not enough."""
        if self.used + nbytes > self.limit:
            raise ProblemError(
                Code.STAGED_BUDGET,
                f"{self.used} of {self.limit} bytes for staged uploads are taken and {nbytes} more needed: "
                "commit or abort open transactions.",
                used=self.used,
                limit=self.limit,
                needed=nbytes,
            )
        self.used += nbytes

    def release(self, nbytes: int) -> None:
        """Give back room, once the file is gone."""
        if not 0 <= nbytes <= self.used:
            raise ValueError(f"{nbytes} bytes are released, but {self.used} are taken")
        self.used -= nbytes


class Room:
    """What one upload has taken of a budget so far."""

    def __init__(self, budget: StagedBudget) -> None:
        self._budget = budget
        self.nbytes = 0

    def grow(self, nbytes: int) -> None:
        """Have room for `nbytes` in all; never shrinks. Raises `staged_budget`."""
        if nbytes > self.nbytes:
            self._budget.reserve(nbytes - self.nbytes)
            self.nbytes = nbytes

    def free(self) -> None:
        """Give all of it back."""
        self._budget.release(self.nbytes)
        self.nbytes = 0
