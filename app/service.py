"""The parts of the admin, put together; routes find them here."""

import asyncio
import logging
import secrets
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import httpx
from fastapi import Depends, FastAPI, Request

from app.base import Base
from app.baselines import Baselines
from app.blobs import Blobs
from app.books import Books
from app.changes import Changes
from app.committer import Committer
from app.database import Database
from app.digests import VersionDigests
from app.engine import EngineClient
from app.exports import Exports
from app.failpoints import Failpoints
from app.feed import Feed
from app.idempotency import Replies
from app.journal import Journal
from app.ledger import Ledger
from app.link import EngineLink
from app.metrics import Metrics
from app.operations import Operations
from app.recovery import Recovery
from app.reload import Reloads
from app.rewind import Rewind
from app.settings import Settings
from app.staging import Staging
from app.status import Lookout, engine_status, rooms
from app.tasks import Tasks
from app.token import load_token
from app.transactions import Transactions
from app.undo import UndoRoom
from schemas.events import EngineEvent, StorageEvent, VersionEvent
from schemas.problems import Code, ProblemError
from schemas.status import Progress
from schemas.transactions import State

_log = logging.getLogger(__name__)


class Service:
    """One admin. Making it touches nothing; `running` is where it comes to life."""

    def __init__(self, settings: Settings, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.settings = settings
        self.token: str | None = secrets.token_hex()
        """What requests must bear; until the service runs, something that nobody knows."""
        self.progress: Callable[[], Progress | None] = lambda: None
        """How the start of a managed engine is going; whoever starts one puts it here."""
        self.metrics = Metrics()
        self.feed = Feed(settings.event_backlog, settings.event_readers, settings.event_beat_s)
        self.tasks = Tasks()
        failpoints = Failpoints()
        self.journal = Journal(Database(settings.ledger_file, failpoints))
        self.replies = Replies(settings.idempotency_keys, self.journal)
        self.ledger = Ledger()
        self.transactions = Transactions(settings, self.journal, self.feed)
        self.operations = Operations(self.journal, self.tasks, self.feed, settings.operations)
        self.client = EngineClient(settings, failpoints, transport)
        self.link = EngineLink(self.client, settings)
        undo = UndoRoom(self.client, self.ledger, settings.undo_bytes)
        self.staging = Staging(settings)
        self.blobs = Blobs(settings, self.ledger, failpoints)
        self.baselines = Baselines(self.journal, self.ledger, self.blobs, self.feed, settings.undo_bytes)
        self._base = Base(self.journal)
        books = Books(self.journal, self.ledger, self.blobs, self.transactions, self.operations, self.replies)
        rewind = Rewind(self.ledger, self._base, self.blobs)
        self._digests = VersionDigests(self.link, self.ledger, self.journal)
        self.changes = Changes(
            self.link,
            self.ledger,
            books,
            self.blobs,
            rewind,
            Committer(self.link, books, self._digests, self.metrics),
            undo,
            self.staging,
            self.metrics,
        )
        self.recovery = Recovery(
            self.link,
            self.ledger,
            self.journal,
            books,
            self.blobs,
            self._base,
            self._digests,
            self.changes,
            self.transactions,
            self.staging,
        )
        self.link.recover = self.recovery.recover
        self.exports = Exports(settings, self.client, self.link, self.ledger, self.operations)
        self.lookout = Lookout(self.feed, self._engine_event, self._storage_event, settings.event_look_s)
        self.reloads = Reloads(settings, self.client, self.link, self.ledger, self.changes)

    @asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncIterator[None]:
        """The app's lifespan: open the ledger, find the engine, let transactions expire."""
        self.token = await asyncio.to_thread(load_token, self.settings)
        await asyncio.to_thread(_make, self.settings.state_dir)
        await self._remember()
        self.ledger.tell = lambda record: self.feed.publish(VersionEvent(version=self.ledger.entry(record)))
        await asyncio.to_thread(_empty, self.settings.staged_dir, self.settings.read_dir)
        background = [
            asyncio.create_task(work)
            for work in (
                self.link.watch(),
                self._sweep(),
                self._digests.record_for_ever(),
                self.lookout.look_for_ever(),
            )
        ]
        try:
            yield
        finally:
            self.feed.close()
            await self.exports.close()
            await self.tasks.drain()
            for task in background:
                task.cancel()
            await asyncio.wait(background)
            await self.client.close()
            await self.journal.close()

    async def _remember(self) -> None:
        """Take over what an earlier process wrote down; a damaged ledger is said and not built on."""
        try:
            await asyncio.to_thread(_require_whole, self.settings)
            found = await self.journal.open()
            if found.versions:
                self.ledger.begin(found.ledger, found.versions, found.baselines)
            else:
                self.ledger.id = found.ledger
            intent = found.intent
            await self.blobs.begin(intent.uploads if intent else ())
            await self.transactions.begin(found.transactions, intent.change.transaction if intent else None)
            await self.operations.begin(found.operations, intent.operation if intent else None)
        except ProblemError as error:
            if error.code is not Code.LEDGER_DAMAGED:
                await self.journal.close()
                raise
            _log.error("%s", error.detail)
            self.link.give_up(error)
            return
        self.replies.begin(found.replies)
        self._base.record, self._base.loaded = found.base, found.loaded

    async def ready_version(self) -> int:
        """The version that the engine was just seen to serve.

        Raises engine_unavailable, recovering, state_unknown.
        """
        self.link.require_known()
        changing = self.changes.busy
        state = await self.link.state(self.settings.engine_probe_s)
        if changing or self.changes.busy:
            return self.ledger.current.version  # either side of the change is right
        if any(rank.version != self.ledger.current.version for rank in state.ranks):
            raise ProblemError(Code.RECOVERING, "The engine does not run the current version.")
        if state.paused:
            raise ProblemError(Code.ENGINE_UNAVAILABLE, "Generation is paused, and not by a commit.")
        return self.ledger.current.version

    def _engine_event(self) -> EngineEvent:
        """The engine, and whether it can be changed, as of now."""
        progress = self.recovery.progress or self.progress()
        return EngineEvent(
            writable=self.link.problem is None,
            busy=self.changes.busy,
            engine=engine_status(self.client, self.link, progress, self.recovery.proved),
        )

    def _storage_event(self) -> StorageEvent:
        """Bytes in use, as of now."""
        return StorageEvent(storage=rooms(self.settings, self.staging, self.changes.undo, self.blobs))

    async def _sweep(self) -> None:
        """Let overdue transactions expire, for ever."""
        while True:
            await asyncio.sleep(self.settings.sweep_s)
            for transaction in self.transactions.live():
                if transaction.overdue:
                    try:
                        await self.changes.end(transaction, State.EXPIRED)
                    except ProblemError:
                        _log.exception("letting transaction %s expire", transaction.id)


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(_service)]
"""The app's service, as a parameter of a route."""


def _require_whole(settings: Settings) -> None:
    """Raises ledger_damaged if there is something that only a ledger could tell the meaning of."""
    if not settings.ledger_file.exists() and settings.blob_dir.is_dir() and any(settings.blob_dir.iterdir()):
        name = settings.ledger_file.name
        raise ProblemError(Code.LEDGER_DAMAGED, f"{name} is gone, though there are uploads of its versions.")


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def _empty(*folders: Path) -> None:
    """Folders that only this user can enter, with nothing left over from an earlier run."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
