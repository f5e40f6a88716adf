"""From one version to the next: prepare, commit and rollback, one change at a time."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from app import outcome
from app.blobs import Blobs
from app.books import Books
from app.committer import Committer
from app.engine import EngineUnreachable, Work
from app.ledger import Ledger
from app.lineage import compacted
from app.link import EngineLink, undo_of
from app.logs import bound, event
from app.metrics import Metrics
from app.operations import Asker
from app.outcome import NotBegun
from app.preconditions import Precondition, check_base
from app.receipts import Change
from app.rewind import Rewind
from app.source import Source
from app.staging import Staging
from app.transactions import IDLE, Prepared, Transaction
from app.undo import UndoRoom
from loaders.staged import fsync_all
from schemas.bridge import EngineState
from schemas.problems import Code, ProblemError
from schemas.transactions import FlightOptions, Receipt, State
from schemas.versions import ReloadRequest, VersionKind

_log = logging.getLogger(__name__)

_OVERTAKEN_S = 0.05
"""Pause before preparing again when another change came between."""


class Changes:
    """Owns the way from the ledger's current version to the next one."""

    def __init__(
        self,
        link: EngineLink,
        ledger: Ledger,
        books: Books,
        blobs: Blobs,
        rewind: Rewind,
        committer: Committer,
        undo: UndoRoom,
        staging: Staging,
        metrics: Metrics,
    ) -> None:
        self.undo = undo
        self._idle = asyncio.Event()
        self._idle.set()
        self._link = link
        self._ledger = ledger
        self._books = books
        self._blobs = blobs
        self._rewind = rewind
        self._committer = committer
        self._staging = staging
        self._metrics = metrics

    @property
    def busy(self) -> bool:
        """Whether a commit or rollback is under way."""
        return not self._idle.is_set()

    def require_idle(self) -> None:
        """Raises busy."""
        if self.busy:
            raise ProblemError(Code.BUSY, "Wait for the commit or rollback that is under way.")

    async def ended(self) -> None:
        """Return once no change is under way; one whose engine is gone finds that out by itself."""
        await self._idle.wait()

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
                with bound(transaction=transaction.id):
                    return await self._prepared(transaction, current, state)
            except ProblemError as error:
                if error.code is not Code.VERSION_MOVED or not self._overtaken(current):
                    raise
            await asyncio.sleep(_OVERTAKEN_S)

    async def commit(self, transaction: Transaction, expected: Precondition, asker: Asker) -> Receipt:
        """All ranks or none; prepares first where that is needed."""
        with self._exclusive(), self._told("commit", transaction=transaction.id):
            self._link.require_writable()
            transaction.require(IDLE)
            current = self._ledger.current.version
            expected.check(current)
            check_base(transaction.options.base_version, current)
            transaction.require_content()
            state = await self._state_at(current)
            prepared = await self._prepared(transaction, current, state)
            self._require_blob_room(transaction)
            await self.undo.make(_undo_nbytes(prepared))
            receipt = await self._commit_transaction(transaction, prepared, asker)
        await self._discard(transaction)
        return receipt

    async def rollback(
        self, target: int, expected: Precondition, flight: FlightOptions, asker: Asker
    ) -> Receipt:
        """A new version with the weights of `target`. Raises version_not_held and what a commit does."""
        with self._exclusive(), self._told("rollback", restores=target):
            self._link.require_writable()
            current = self._ledger.current.version
            expected.check(current)
            await self._state_at(current)
            self._ledger.require_held(target)
            by_undo = self._ledger.undoable(target)
            if by_undo:
                work = Work(restore=self._ledger.nearest(target), undo_most=self.undo.room(target))
            else:
                uploads = await self._rewind.uploads(target, self._link.require())
                work = Work(uploads=uploads, undo_most=self.undo.room())
            prepared = await self._phase_one(current, work)
            change = Change(
                kind=VersionKind.ROLLBACK, version=self._ledger.next, base=current, restores=target
            )
            async with self._dropped_if_refused(prepared):
                await self.undo.make(_undo_nbytes(prepared), restoring=target if by_undo else None)
                intent = await self._committer.intend(change, prepared, flight, asker)
            receipt = await self._committer.commit(intent, prepared)
            await self.undo.trim()
        return receipt

    async def reload(
        self, source: Source, request: ReloadRequest, expected: Precondition, asker: Asker
    ) -> Receipt:
        """A new version with the weights of `source`. Raises what a commit does, and bad_checkpoint."""
        with self._exclusive(), self._told("reload"):
            self._link.require_writable()
            current = self._ledger.current.version
            expected.check(current)
            check_base(request.base_version, current)
            await self._state_at(current)
            work = Work(uploads=source.uploads, undo_most=self.undo.room())
            prepared = await self._phase_one(current, work)
            change = Change(
                kind=VersionKind.RELOAD,
                version=self._ledger.next,
                base=current,
                path=str(source.folder.path),
                label=request.label,
            )
            async with self._dropped_if_refused(prepared):
                # From here on the values are the engine's own; the files may change.
                await asyncio.to_thread(source.require_unchanged)
                await self.undo.make(_undo_nbytes(prepared))
                intent = await self._committer.intend(change, prepared, request, asker, source.uploads)
            return await self._committer.commit(intent, prepared)

    async def end(self, transaction: Transaction, state: State) -> None:
        """Abort or expire: nothing of it stays, here or on the engine."""
        transaction.move(state)
        with bound(transaction=transaction.id):
            event(_log, logging.INFO, "transaction ended", state=state)
            await self._discard(transaction)
            await self._books.ended(transaction)

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
        self._idle.clear()
        try:
            yield
        finally:
            self._idle.set()

    async def _state_at(self, current: int) -> EngineState:
        """Where the engine stands; the ledger learns what undo it really holds."""
        state = await self._link.state_at(current)
        if state.paused:  # and not by a change, since this is the only one
            raise ProblemError(Code.ENGINE_ASLEEP, "Wake the engine, or resume its generation, first.")
        self._ledger.learn_undo(undo_of(state))
        return state

    @contextmanager
    def _told(self, kind: str, **fields: object) -> Iterator[None]:
        """Count a change and log how it ends; what is logged within carries `fields`."""
        with bound(change=kind, **fields):
            try:
                with self._metrics.change(kind):
                    yield
            except ProblemError as error:
                event(_log, logging.WARNING, "change refused", code=error.code, detail=error.detail)
                raise

    async def _phase_one(self, current: int, work: Work) -> Prepared:
        prepared = await outcome.prepare(self._link, _key(), current, work)
        self._metrics.prepared(prepared.result.prepare_ms)
        return prepared

    def _require_blob_room(self, transaction: Transaction) -> None:
        """Raises blob_budget if the new version could not be kept."""
        before = self._ledger.lineage(self._ledger.current.version)
        uploads = tuple(one.staged for one in transaction.uploads)
        lineage = None if before is None else compacted((*before, *uploads))
        baselines = {self._ledger.root(b.version) for b in self._ledger.baselines()}
        self._blobs.require_room(uploads, lineage, baselines)

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
            staged = tuple(one.staged for one in transaction.uploads)
            work = Work(uploads=staged, undo_most=self.undo.room())
            transaction.prepared = await self._phase_one(current, work)
        finally:
            transaction.move(State.OPEN if transaction.prepared is None else State.PREPARED)
        return transaction.prepared

    async def _commit_transaction(
        self, transaction: Transaction, prepared: Prepared, asker: Asker
    ) -> Receipt:
        transaction.move(State.COMMITTING)
        try:
            change = _change(transaction, self._ledger.next, prepared.base)
            staged = tuple(one.staged for one in transaction.uploads)
            files = [one.file for one in transaction.uploads]
            intent = await self._committer.intend(change, prepared, transaction.options, asker, staged, files)
        except BaseException:
            transaction.move(State.PREPARED)
            raise
        try:
            result = await self._committer.carry_out(intent, prepared)
        except (EngineUnreachable, NotBegun) as error:
            # Nothing has happened.
            await self._committer.note_failure(intent, State.PREPARED, error)
            raise
        except ProblemError as error:
            if error.code is Code.STATE_UNKNOWN:
                transaction.problem = error.problem()
                transaction.move(State.FAILED)
                await self._books.ended(transaction)
            else:
                await self._committer.note_failure(intent, State.FAILED, error)
            if transaction.state is State.FAILED:
                await self._staging.discard(transaction.take_files())
            raise
        return await self._committer.record(intent, result)

    @asynccontextmanager
    async def _dropped_if_refused(self, prepared: Prepared) -> AsyncIterator[None]:
        try:
            yield
        except ProblemError:
            await outcome.drop(self._link, prepared.key)
            raise

    async def _discard(self, transaction: Transaction) -> None:
        """Delete the files of an ended transaction, and what the engine may still hold for it."""
        await self._staging.discard(transaction.take_files())
        if transaction.state is not State.COMMITTED:
            await self.void(transaction.prepared)


def _change(transaction: Transaction, version: int, base: int) -> Change:
    uploads = transaction.uploads
    return Change(
        kind=VersionKind.COMMIT,
        version=version,
        base=base,
        transaction=transaction.id,
        label=transaction.options.label,
        uploads=tuple(one.upload for one in uploads),
        tensors=len({write.tensor for one in uploads for write in one.staged.writes}),
        validate_ms=sum(one.validate_ms for one in uploads),
    )


def _key() -> str:
    return secrets.token_hex(8)


def _undo_nbytes(prepared: Prepared) -> int:
    """Undo on the rank that needs most."""
    return max((rank.undo_nbytes for rank in prepared.result.ranks), default=0)
