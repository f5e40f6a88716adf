"""Brings an engine that was found to the version that the ledger says; recorded digests, if any, prove it."""

import asyncio
import logging
import secrets
import time
from datetime import UTC, datetime

from app import outcome
from app.base import REMEDY, Base
from app.blobs import Blobs
from app.books import Books
from app.changes import Changes
from app.digests import VersionDigests
from app.engine import Work
from app.journal import Journal
from app.ledger import Ledger, VersionRecord
from app.lineage import stands_alone
from app.link import Engine, EngineLink, undo_of
from app.records import Intent
from app.staging import Staging
from app.transactions import Prepared, Transactions
from schemas.bridge import EngineState
from schemas.problems import Code, ProblemError
from schemas.status import Progress
from schemas.transactions import State
from schemas.versions import VersionKind

_log = logging.getLogger(__name__)

_STEP_S = 0.02
ADOPTED = "Such a version lasts if it is exported and reloaded from there while its engine runs."


class Recovery:
    """What happens between finding an engine and calling it ready."""

    def __init__(
        self,
        link: EngineLink,
        ledger: Ledger,
        journal: Journal,
        books: Books,
        blobs: Blobs,
        base: Base,
        digests: VersionDigests,
        changes: Changes,
        transactions: Transactions,
        staging: Staging,
    ) -> None:
        self.progress: Progress | None = None
        self.proved: bool | None = None
        """As in `EngineStatus`."""
        self._link = link
        self._ledger = ledger
        self._journal = journal
        self._books = books
        self._blobs = blobs
        self._base = base
        self._digests = digests
        self._changes = changes
        self._transactions = transactions
        self._staging = staging
        self._begun = 0.0

    async def recover(self, engine: Engine) -> None:
        """Have `engine` at the ledger's current version.

        Raises state_unknown if nobody can say what it runs, base_changed, ledger_damaged, version_lost, and
        whatever else keeps it from getting there, after which this can be tried again.
        """
        self._begun = time.monotonic()
        self.proved = None
        try:
            await self._changes.ended()
            self._say("settling")
            await self._settle_intent(engine)
            state = await self._quiet(engine)
            for key in {key for rank in state.ranks for key in rank.prepared}:
                # An earlier admin's, or one that is prepared again when it is needed.
                await outcome.drop(self._link, key)
            await self._bring(engine, state)
        finally:
            self.progress = None

    async def _bring(self, engine: Engine, state: EngineState) -> None:
        at = _version_of(state)
        current = self._ledger.current.version
        known = await self._digests.known(engine, current)
        if self._base.record is None:
            await self._meet(engine, state, at)
        elif at == 0:
            await self._check_base(engine, current)
            if current > 0:
                await self._replay(engine, current)
                state = await self._link.state_at(current)
        elif at != current:
            detail = f"The engine runs version {at}, but {current} is the current one."
            raise ProblemError(Code.STATE_UNKNOWN, f"{detail} Restart the engine.")
        version = self._ledger.current.version
        if known or at == version:
            await self._verify(engine, version)
            self.proved = True if known else None
        else:  # what comes of a replay can't prove that same replay, so it is not recorded either
            self.proved = False
            _log.warning(
                "version %d was replayed and could not be compared: no digests of it were recorded", version
            )
        self._ledger.learn_undo(undo_of(state))
        await self._look_at_base(engine)

    async def _meet(self, engine: Engine, state: EngineState, at: int) -> None:
        """The history begins with this engine; what it did before is not known."""
        record = await self._base.survey(engine.description)
        undo = undo_of(state)
        lowest = at
        while lowest in undo:
            lowest -= 1
        now = datetime.now(UTC)
        adopted = [VersionRecord(v, VersionKind.ADOPTED, now) for v in range(max(lowest, 1), at + 1)]
        await self._journal.begin(record, [self._ledger.get(0), *adopted])
        self._base.record = record
        if at == 0:
            await self._base.proved(engine)
        for one in adopted:
            self._ledger.append(one)
        if adopted:
            _log.warning("the engine runs version %d, which is not in this ledger. %s", at, ADOPTED)

    async def _check_base(self, engine: Engine, current: int) -> None:
        """Raises base_changed if the engine was loaded from another checkpoint than `current` needs."""
        self._say("checking the base")
        try:
            await self._require_base(engine)
        except ProblemError as error:
            alone = stands_alone(self._ledger.lineage(current) or ())
            if error.code is not Code.BASE_CHANGED or not (
                alone and await self._digests.known(engine, current)
            ):
                raise
            # As after a reload of the base's own folder; what comes of it is compared in any case.
            _log.warning("version %d does not need the base: %s", current, error)

    async def _require_base(self, engine: Engine) -> None:
        """Raises base_changed if the engine was loaded from another checkpoint than version 0."""
        await self._base.check_headers(engine.description)
        if not await self._digests.verify(engine, 0):
            detail = "The engine's weights as loaded are not those that the history began with."
            raise ProblemError(Code.BASE_CHANGED, f"{detail} {REMEDY}")
        await self._base.proved(engine)

    async def _replay(self, engine: Engine, current: int) -> None:
        """From base to the current version in one step; what was overwritten later is not sent."""
        lineage = self._ledger.lineage(current)
        if lineage is None:
            detail = (
                f"Version {current} was met on an engine that is gone, or builds on one that was; what it"
            )
            detail = f"{detail} consists of is not in this ledger. {ADOPTED}"
            raise ProblemError(Code.VERSION_LOST, f"{detail} Begin a new history in another state folder.")
        nbytes = sum(write.values.nbytes for upload in lineage for write in upload.writes)
        self._say(f"{len(lineage)} uploads, {nbytes} bytes: reading")
        uploads = await self._blobs.checked(lineage)
        self._say(f"{len(lineage)} uploads, {nbytes} bytes: preparing")
        # Undo would lead to the base and not to the version before, and nobody is served meanwhile.
        work = Work(uploads=uploads, replay=True)
        prepared = await outcome.prepare(self._link, secrets.token_hex(8), 0, work)
        self._say(f"{len(lineage)} uploads, {nbytes} bytes: writing")
        await outcome.commit(self._link, engine.boots, prepared, current)

    async def _verify(self, engine: Engine, version: int) -> None:
        self._say(f"checking the digests of version {version}")
        if not await self._digests.verify(engine, version):
            detail = f"The digests are not those that were recorded at version {version}."
            raise ProblemError(Code.STATE_UNKNOWN, detail)

    async def _look_at_base(self, engine: Engine) -> None:
        try:
            self._ledger.base_at_hand = await self._base.at_hand(engine.description)
        except ProblemError:
            # The engine was loaded from the right one, so it serves on; a new one would be refused.
            self._ledger.base_at_hand = False

    async def _settle_intent(self, engine: Engine) -> None:
        """Find out how a change ended whose outcome was not written down."""
        intent = self._journal.intent
        if intent is None:
            return
        change = intent.change
        if intent.boots != engine.boots:
            lost = ProblemError(Code.COMMIT_UNDONE, "The engine was restarted before the change was done.")
            await self._undone(intent, lost)
            return
        prepared = Prepared(intent.key, change.base, intent.prepared)
        unwritten = ProblemError(Code.INTERNAL, "How the change ended was not written down.")
        try:
            result = await outcome.settle(
                self._link, engine.boots, prepared, change.version, unwritten, intent.flight
            )
        except ProblemError as error:
            if error.code is not Code.COMMIT_UNDONE:
                raise
            await self._undone(intent, error)
        else:
            await self._books.done(intent, result)
            await self._discard(intent)

    async def _undone(self, intent: Intent, error: ProblemError) -> None:
        transaction = self._transactions.find(intent.change.transaction)
        state = State.FAILED
        if transaction is not None and transaction.state is State.COMMITTING and transaction.past:
            state = State.INTERRUPTED
        await self._books.failed(intent, state, error)
        await self._discard(intent)

    async def _discard(self, intent: Intent) -> None:
        transaction = self._transactions.find(intent.change.transaction)
        if transaction is not None:
            await self._staging.discard(transaction.take_files())

    async def _quiet(self, engine: Engine) -> EngineState:
        """Where the engine stands once it is not paused. Raises state_unknown if it stays so."""
        clock = asyncio.get_running_loop().time
        until = clock() + self._link.settle_s
        while (state := await self._link.state()).paused:
            if clock() > until:
                raise ProblemError(Code.STATE_UNKNOWN, "The engine stays paused; restart it.")
            await asyncio.sleep(_STEP_S)
        return state

    def _say(self, detail: str) -> None:
        self.progress = Progress(phase="replaying", detail=detail, elapsed_s=time.monotonic() - self._begun)


def _version_of(state: EngineState) -> int:
    """Raises state_unknown if the ranks run different ones."""
    versions = {rank.version for rank in state.ranks}
    if len(versions) != 1:
        raise ProblemError(Code.STATE_UNKNOWN, "The ranks run different versions; restart the engine.")
    return versions.pop()
