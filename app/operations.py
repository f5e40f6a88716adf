"""Operations: work that is followed by an id, so that a lost connection loses no answer."""

import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from app.feed import Feed
from app.journal import Journal
from app.logs import bound
from app.problems import as_problem
from app.records import Ticket
from app.tasks import Tasks
from schemas.events import OperationEvent
from schemas.operations import Operation, OperationKind, OperationState
from schemas.problems import Code, ProblemError
from schemas.transactions import Receipt

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asker:
    """Who is told how a change ended, durably with its outcome: an idempotency key, or an operation."""

    ticket: Ticket | None = None
    operation: str | None = None


class Operations:
    """All that run, and the latest that have ended."""

    def __init__(self, journal: Journal, tasks: Tasks, feed: Feed, limit: int) -> None:
        self._journal = journal
        self._tasks = tasks
        self._feed = feed
        self._limit = limit
        self._all: dict[str, Operation] = {}

    async def begin(self, operations: Iterable[Operation], in_doubt: str | None) -> None:
        """Take over what an earlier process left: what ran is interrupted, but for the one `in_doubt`."""
        self._all = {one.id: one for one in operations}
        cut = [
            one.model_copy(update={"state": OperationState.INTERRUPTED, "ended_at": datetime.now(UTC)})
            for one in self._all.values()
            if one.state is OperationState.RUNNING and one.id != in_doubt
        ]
        if cut:
            await self._journal.try_put(cut)
        for one in cut:
            self.put(one)

    def get(self, id: str) -> Operation:
        """One operation; raises unknown_operation."""
        if id not in self._all:
            raise ProblemError(Code.UNKNOWN_OPERATION, "There is no operation of this id, or no longer.")
        return self._all[id]

    def put(self, operation: Operation) -> None:
        """An operation as it stands now; its progress need not outlive the service."""
        self._all[operation.id] = operation
        version = operation.receipt.version if operation.receipt else None
        brief = operation.model_copy(update={"receipt": None})  # it can be as long as a transaction
        self._feed.publish(OperationEvent(operation=brief, version=version))

    async def keep(self, operation: Operation) -> None:
        """Remember one that begins, and forget old ones for it. Raises disk_full."""
        ended = [one for one in self._all.values() if one.state is not OperationState.RUNNING]
        forgotten = ended[: max(0, len(ended) - self._limit)]
        await self._journal.put([operation], forgotten)
        for one in forgotten:
            del self._all[one.id]
        self.put(operation)

    async def end(self, operation: Operation) -> None:
        """Remember how one has ended that made no change, or none that is in the ledger."""
        self.put(operation)
        await self._journal.try_put([operation])

    def ended(
        self, id: str, receipt: Receipt | None = None, problem: ProblemError | None = None
    ) -> Operation:
        """How an operation will stand once it is done, has failed, or turns out to have been cut short."""
        state = OperationState.INTERRUPTED
        if receipt is not None:
            state = OperationState.DONE
        elif problem is not None:
            state = OperationState.FAILED
        document = problem.problem() if problem else None
        update = {"state": state, "ended_at": datetime.now(UTC), "receipt": receipt, "problem": document}
        return self.get(id).model_copy(update=update)

    async def start(
        self, kind: OperationKind, transaction: str | None, run: Callable[[Asker], Awaitable[Receipt]]
    ) -> Operation:
        """Begin the change `run`; the operation to follow. Raises disk_full."""
        operation = Operation(
            id=secrets.token_hex(8),
            kind=kind,
            state=OperationState.RUNNING,
            created_at=datetime.now(UTC),
            transaction=transaction,
        )
        await self.keep(operation)
        self._tasks.start(self._follow(operation.id, run))
        return operation

    async def _follow(self, id: str, run: Callable[[Asker], Awaitable[Receipt]]) -> None:
        try:
            with bound(operation=id):
                receipt = await run(Asker(operation=id))
        except Exception as error:  # noqa: BLE001 - whoever follows the operation is told, like any client
            if not isinstance(error, ProblemError):
                _log.exception("operation %s", id)
            ended = self.ended(id, problem=as_problem(error))
        else:
            ended = self.ended(id, receipt=receipt)
        if self.get(id).state is not OperationState.RUNNING:
            return  # that stands in the ledger, together with what it did
        await self.end(ended)
