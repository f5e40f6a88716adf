"""Operations: work that is followed by an id. Kept in memory."""

from collections.abc import Iterable

from schemas.operations import Operation, OperationState
from schemas.problems import Code, ProblemError


class Operations:
    """All that run, and the latest that have ended."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._all: dict[str, Operation] = {}

    def get(self, id: str) -> Operation:
        """One operation; raises unknown_operation."""
        if id not in self._all:
            raise ProblemError(Code.UNKNOWN_OPERATION, "There is no operation of this id, or no longer.")
        return self._all[id]

    def put(self, operation: Operation) -> None:
        """An operation as it stands now; progress need not outlive the service."""
        self._all[operation.id] = operation

    async def keep(self, operation: Operation) -> None:
        """An operation that has begun or ended."""
        self.put(operation)
        for id in self._forgotten():
            del self._all[id]

    def _forgotten(self) -> Iterable[str]:
        ended = [one.id for one in self._all.values() if one.state is not OperationState.RUNNING]
        return ended[: max(0, len(ended) - self._limit)]
