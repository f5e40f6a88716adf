"""From one version to the next: prepare, commit and rollback, one change at a time."""

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from app import outcome
from app.engine import EngineUnreachable
from app.ledger import Ledger, VersionRecord
from app.link import EngineLink, undo_of
from app.metrics import Metrics
from app.outcome import NotBegun, Work
from app.preconditions import Precondition, check_base
from app.receipts import Change, receipt_of
from app.source import Source
from app.staging import Staging
from app.transactions import IDLE, Prepared, Transaction
from app.undo import UndoRoom
from loaders.staged import fsync_all
from schemas.bridge import CommitResult, EngineState
from schemas.problems import Code, ProblemError
from schemas.transactions import RECOMPUTE, FlightOptions, Receipt, State
from schemas.versions import ReloadRequest, VersionKind

_OVERTAKEN_S = 0.05
"""Pause before preparing again when another change came between."""


class Changes:
    """Owns the way from the ledger's current version to the next one."""

    def __init__(
        self, link: EngineLink, ledger: Ledger, undo: UndoRoom, staging: Staging, metrics: Metrics
    ) -> None:
        self.undo = undo
        self.busy = False
        """Whether a commit or rollback is under way."""
        self._link = link
        self._ledger = ledger
        self._staging = staging
        self._metrics = metrics

    def require_idle(self) -> None:
        """Raises busy."""
        if self.busy:
            raise ProblemError(Code.BUSY, "Wait for the commit or rollback that is under way.")

    async def prepare(self, transaction: Transaction) -> Prepared:
        """Phase one, bound to the current version. The transaction stays open if it fails."""
        while True:
            self._link.require_writable()
            transaction.require(IDLE)
            current = self._ledger.current.version
            check_base(transaction.options.base_version, current)
            transaction.require_content()
            state = await self._link.state()
            try:
                return await self._prepared(transaction, current, state)
            except ProblemError as error:
                if error.code is not Code.VERSION_MOVED or not self._overtaken(current):
                    raise
            await asyncio.sleep(_OVERTAKEN_S)

    async def commit(self, transaction: Transaction, expected: Precondition) -> Receipt:
        """All ranks or none; prepares first where that is needed."""
        with self._exclusive(), self._metrics.change("commit"):
            self._link.require_writable()
            transaction.require(IDLE)
            current = self._ledger.current.version
            expected.check(current)
            check_base(transaction.options.base_version, current)
            transaction.require_content()
            state = await self._state_at(current)
            prepared = await self._prepared(transaction, current, state)
            await self.undo.make(_undo_nbytes(prepared))
            result = await self._commit_transaction(transaction, prepared)
            change = Change(VersionKind.COMMIT, self._ledger.next, current, transaction=transaction)
            transaction.receipt = self._record(change, prepared, result)
            transaction.move(State.COMMITTED)
        await self._discard(transaction)
        return transaction.receipt

    async def rollback(
        self, target: int, expected: Precondition, flight: FlightOptions = RECOMPUTE
    ) -> Receipt:
        """A new version with the weights of `target`. Raises version_not_held and what a commit does."""
        with self._exclusive(), self._metrics.change("rollback"):
            self._link.require_writable()
            current = self._ledger.current.version
            expected.check(current)
            await self._state_at(current)
            self._ledger.require_held(target)
            nearest = self._ledger.nearest(target)
            prepared = await outcome.prepare(self._link, _key(), current, Work(restore=nearest))
            try:
                await self.undo.make(_undo_nbytes(prepared), restoring=target)
            except ProblemError:
                await outcome.drop(self._link, prepared.key)
                raise
            result = await self._commit_on_engine(prepared, flight)
            change = Change(VersionKind.ROLLBACK, self._ledger.next, current, restores=target)
            receipt = self._record(change, prepared, result)
            await self.undo.trim()
        return receipt

    async def reload(self, source: Source, request: ReloadRequest, expected: Precondition) -> Receipt:
        """A new version with the weights of `source`. Raises what a commit does, and bad_checkpoint."""
        with self._exclusive(), self._metrics.change("reload"):
            self._link.require_writable()
            current = self._ledger.current.version
            expected.check(current)
            check_base(request.base_version, current)
            await self._state_at(current)
            prepared = await outcome.prepare(self._link, _key(), current, Work(uploads=source.uploads))
            try:
                # From here on the values are the engine's own; the files may change.
                await asyncio.to_thread(source.require_unchanged)
                await self.undo.make(_undo_nbytes(prepared))
            except ProblemError:
                await outcome.drop(self._link, prepared.key)
                raise
            result = await self._commit_on_engine(prepared, request)
            path = str(source.folder.path)
            change = Change(VersionKind.RELOAD, self._ledger.next, current, path=path, label=request.label)
            return self._record(change, prepared, result)

    async def end(self, transaction: Transaction, state: State) -> None:
        """Abort or expire: nothing of it stays, here or on the engine."""
        transaction.move(state)
        await self._discard(transaction)

    async def void(self, prepared: Prepared | None) -> None:
        """Let the engine drop prepared work that will not be committed."""
        if prepared is not None:
            await outcome.drop(self._link, prepared.key)

    def _overtaken(self, version: int) -> bool:
        """Whether a change that came between explains why the engine is not at `version`."""
        return self.busy or self._ledger.current.version != version

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self.require_idle()
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    async def _state_at(self, current: int) -> EngineState:
        """Where the engine stands; the ledger learns what undo it really holds."""
        state = await self._link.state_at(current)
        if state.paused:  # and not by a change, since this is the only one
            raise ProblemError(Code.ENGINE_ASLEEP, "Wake the engine, or resume its generation, first.")
        self._ledger.undo = undo_of(state)
        return state

    async def _prepared(self, transaction: Transaction, current: int, state: EngineState) -> Prepared:
        """What the engine still holds prepared for `current`, or newly prepared work."""
        transaction.require(IDLE)
        old = transaction.prepared
        if old is not None and old.base == current and all(old.key in rank.prepared for rank in state.ranks):
            return old
        transaction.move(State.PREPARING)
        transaction.prepared = None
        try:
            await self.void(old)
            # Durable together; a disk that is full shows here at the latest.
            await asyncio.to_thread(fsync_all, [one.file for one in transaction.uploads])
            work = Work(uploads=tuple(one.staged for one in transaction.uploads))
            transaction.prepared = await outcome.prepare(self._link, _key(), current, work)
        finally:
            transaction.move(State.OPEN if transaction.prepared is None else State.PREPARED)
        return transaction.prepared

    async def _commit_transaction(self, transaction: Transaction, prepared: Prepared) -> CommitResult:
        transaction.move(State.COMMITTING)
        try:
            return await self._commit_on_engine(prepared, transaction.options)
        except (EngineUnreachable, NotBegun):
            transaction.move(State.PREPARED)  # nothing has happened
            raise
        except ProblemError as error:
            transaction.problem = error.problem()
            transaction.move(State.FAILED)
            await self._staging.discard(transaction.take_files())
            raise

    async def _commit_on_engine(self, prepared: Prepared, flight: FlightOptions) -> CommitResult:
        boots = self._link.require().boots
        try:
            return await outcome.commit(self._link, boots, prepared, self._ledger.next, flight)
        except ProblemError as error:
            if error.code is Code.STATE_UNKNOWN:
                self._link.mark_unknown(error.detail, boots)
            else:
                await outcome.drop(self._link, prepared.key)
            raise
        except BaseException:
            # Cut short by a shutdown or a bug: nobody saw the outcome, so nobody may build on it.
            self._link.mark_unknown("A commit was cut short; restart the engine.", boots)
            raise

    def _record(self, change: Change, prepared: Prepared, result: CommitResult) -> Receipt:
        receipt = receipt_of(change, prepared, result)
        self._ledger.append(
            VersionRecord(
                version=change.version,
                kind=change.kind,
                created_at=datetime.now(UTC),
                base_version=change.base,
                restores=change.restores,
                transaction=receipt.transaction,
                label=receipt.label,
                receipt=receipt,
            )
        )
        self._ledger.undo[change.version] = max((rank.undo_nbytes for rank in result.ranks), default=0)
        self._metrics.paused(result.pause_ms + result.apply_ms + result.resume_ms)
        return receipt

    async def _discard(self, transaction: Transaction) -> None:
        """Delete the files of an ended transaction, and what the engine may still hold for it."""
        await self._staging.discard(transaction.take_files())
        if transaction.state is not State.COMMITTED:
            await self.void(transaction.prepared)


def _key() -> str:
    return secrets.token_hex(8)


def _undo_nbytes(prepared: Prepared) -> int:
    """Undo on the rank that needs most."""
    return max((rank.undo_nbytes for rank in prepared.result.ranks), default=0)
