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

from app.access import load_token
from app.changes import Changes
from app.engine import EngineClient
from app.exports import Exports
from app.idempotency import Replies
from app.ledger import Ledger
from app.link import EngineLink
from app.metrics import Metrics
from app.operations import Operations
from app.reload import Reloads
from app.settings import Settings
from app.staging import Staging
from app.tasks import Tasks
from app.transactions import Transactions
from app.undo import UndoRoom
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
        self.tasks = Tasks()
        self.replies = Replies(settings.idempotency_keys)
        self.ledger = Ledger()
        self.transactions = Transactions(settings)
        self.client = EngineClient(settings, transport)
        self.link = EngineLink(self.client, self.ledger, settings)
        undo = UndoRoom(self.client, self.ledger, settings.undo_bytes)
        self.staging = Staging(settings)
        self.changes = Changes(self.link, self.ledger, undo, self.staging, self.metrics)
        self.operations = Operations(settings.operations)
        self.exports = Exports(settings, self.client, self.link, self.ledger, self.operations)
        self.reloads = Reloads(settings, self.client, self.link, self.ledger, self.changes)

    @asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncIterator[None]:
        """The app's lifespan: make folders, find the engine, let transactions expire."""
        self.token = await asyncio.to_thread(load_token, self.settings)
        await asyncio.to_thread(_empty, self.settings.staged_dir, self.settings.read_dir)
        background = [asyncio.create_task(self.link.watch()), asyncio.create_task(self._sweep())]
        try:
            yield
        finally:
            await self.exports.close()
            await self.tasks.drain()
            for task in background:
                task.cancel()
            await asyncio.wait(background)
            await self.client.close()

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


def _empty(*folders: Path) -> None:
    """Folders that only this user can enter, with nothing left over from an earlier run."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
