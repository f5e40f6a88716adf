"""How a change is written down: the intent before the engine is touched, what came of it afterwards."""

from collections.abc import Sequence
from datetime import UTC, datetime

from starlette.responses import JSONResponse

from app.blobs import Blobs
from app.idempotency import Replies, reply_of
from app.journal import Journal
from app.ledger import Ledger, VersionRecord
from app.operations import Operations
from app.preconditions import etag
from app.receipts import receipt_of
from app.records import Intent, Reply, Ticket
from app.transactions import Transaction, Transactions
from loaders.staged import StagedFile
from schemas import transactions as wire
from schemas.bridge import CommitResult
from schemas.operations import Operation
from schemas.problems import ProblemError
from schemas.transactions import Receipt, State


class Books:
    """Ledger, blobs, and those who are told how a change ended; all of them agree on it."""

    def __init__(
        self,
        journal: Journal,
        ledger: Ledger,
        blobs: Blobs,
        transactions: Transactions,
        operations: Operations,
        replies: Replies,
    ) -> None:
        self._journal = journal
        self._ledger = ledger
        self._blobs = blobs
        self._transactions = transactions
        self._operations = operations
        self._replies = replies

    async def intend(self, intent: Intent, files: Sequence[StagedFile] = ()) -> Intent:
        """Make the `files` that the change needs durable, then that it is about to be made.

        Raises disk_full.
        """
        try:
            await self._blobs.keep(files)
            return await self._journal.intend(intent)
        except BaseException:
            await self._blobs.settle()
            raise

    async def done(self, intent: Intent, result: CommitResult) -> Receipt:
        """The engine is at the new version: write it down. Raises disk_full, and the intent stays open."""
        receipt = receipt_of(intent.change, intent.prepared, result)
        record = _record(intent, receipt)
        reply = _reply(intent, receipt)
        views: list[wire.Transaction | Operation] = []
        transaction = self._transactions.find(intent.change.transaction)
        if transaction is not None:
            update = {"state": State.COMMITTED, "receipt": receipt}
            views.append(transaction.view().model_copy(update=update))
        if intent.operation is not None:
            views.append(self._operations.ended(intent.operation, receipt=receipt))
        await self._journal.conclude(intent, record, reply, views)
        self._ledger.undo[record.version] = max((rank.undo_nbytes for rank in result.ranks), default=0)
        self._ledger.append(record)
        if transaction is not None:
            transaction.turn_out(State.COMMITTED, receipt, None)
        self._show(views)
        if reply is not None:
            self._replies.remember(reply)
        await self._blobs.settle()
        return receipt

    async def failed(self, intent: Intent, state: State, problem: ProblemError) -> None:
        """The engine is where it was: write that down, and that the transaction is in `state` now.

        Raises disk_full, and the intent stays open.
        """
        views: list[wire.Transaction | Operation] = []
        document = None if state is State.PREPARED else problem.problem()
        transaction = self._transactions.find(intent.change.transaction)
        if transaction is not None:
            views.append(transaction.view().model_copy(update={"state": state, "problem": document}))
        if intent.operation is not None:
            views.append(self._operations.ended(intent.operation, problem=problem))
        await self._journal.abandon(intent, views)
        if transaction is not None:
            transaction.turn_out(state, None, document)
        self._show(views)
        await self._blobs.settle()

    async def ended(self, transaction: Transaction) -> None:
        """A transaction ended without a commit, or with one that nobody knows the outcome of."""
        await self._transactions.note_end(transaction)

    def _show(self, views: Sequence[wire.Transaction | Operation]) -> None:
        for view in views:
            if isinstance(view, Operation):
                self._operations.put(view)


def _record(intent: Intent, receipt: Receipt) -> VersionRecord:
    return VersionRecord(
        version=receipt.version,
        kind=intent.change.kind,
        created_at=datetime.now(UTC),
        base_version=receipt.base_version,
        restores=receipt.restores,
        transaction=receipt.transaction,
        label=receipt.label,
        receipt=receipt,
        uploads=intent.uploads,
    )


def _reply(intent: Intent, receipt: Receipt) -> Reply | None:
    """What a request that comes again is told, as if it had been answered."""
    if intent.ticket is None:
        return None
    response = JSONResponse(receipt.model_dump(mode="json"), headers={"etag": etag(receipt.version)})
    return reply_of(Ticket(*intent.ticket), response)
