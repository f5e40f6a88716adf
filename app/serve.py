"""Runs the admin, and in managed mode the engine with it, in the foreground until told to stop."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI
from rich.console import Console

from app.allocator import keep_freed
from app.engine_log import doing, last_lines
from app.guide import Guide
from app.heads import BoundedHeads
from app.listen import listen, require_free, url_of
from app.progress import progress_on
from app.service import Service
from app.settings import Settings
from app.supervisor import ManagedEngine, Supervisor, make_secret
from schemas.problems import Code
from schemas.status import Progress

ADMIN_GRACE_S = 25
"""For what the admin is doing when the end comes: a commit finishes or is undone."""
ENGINE_GRACE_S = 20
"""For vLLM to end by itself."""
HUNG_GRACE_S = 5
"""For an engine that does not answer to end by itself."""
LAST_GRACE_S = 5
"""For whoever still waited for the engine. All three stay below the minute in which a service must end."""
RESTARTS = 5
"""How often an engine is started again within `RESTARTS_WITHIN_S` seconds before the service ends."""
RESTARTS_WITHIN_S = 900
RESTART_PAUSE_S = 2
"""To wait before a start, for each of the latest restarts."""
POLL_S = 0.5
LOG_LINES = 30

_log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: here a signal ends two things, in order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Foreground:
    """One run of `graft serve`."""

    def __init__(
        self, app: FastAPI, settings: Settings, engine: ManagedEngine | None, console: Console
    ) -> None:
        self._app = app
        self._settings = settings
        self._engine = engine
        self._console = console
        self._service: Service = app.state.service
        self._supervisor = Supervisor(engine.command, engine.record) if engine else None
        self._progress: Progress | None = None
        self._was_ready = False
        self._restarts: deque[float] = deque(maxlen=RESTARTS)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=BoundedHeads,
                lifespan="off",  # it is run here, where its failure can be told in a line
                log_config=None,  # its loggers' lines go where all go
                access_log=False,  # `app/requests.py` has a line for each request
                server_header=False,
                timeout_graceful_shutdown=ADMIN_GRACE_S,
            )
        )

    async def run(self) -> int:
        """Serve until a signal comes or a part ends by itself; returns the exit status.

        Raises AddressError if an address is taken, ProblemError if the admin can't come up.
        """
        keep_freed()
        stop = asyncio.create_task(_signalled())
        if self._engine and self._supervisor and not await self._taken_over(self._supervisor):
            require_free(self._engine.host, self._engine.port)
        listener = listen(self._settings.host, self._settings.port)
        admin = asyncio.create_task(self._serve(listener))
        try:
            if not await self._started(admin, stop):
                return 0 if stop.done() else 1
            self._say(f"admin: {url_of(self._settings.host, listener.getsockname()[1])}")
            return await self._until_the_end(admin, stop, listener.getsockname()[1])
        finally:
            await self._end(admin)
            stop.cancel()

    async def _serve(self, listener: socket.socket) -> None:
        async with self._app.router.lifespan_context(self._app):
            await self._server.serve(sockets=[listener])

    async def _end(self, admin: asyncio.Task[None]) -> None:
        self._service.feed.close()  # else the server would wait for its readers
        self._server.should_exit = True
        await asyncio.wait({admin}, timeout=ADMIN_GRACE_S)
        if self._supervisor:
            await self._supervisor.stop(ENGINE_GRACE_S)
        await asyncio.wait({admin}, timeout=LAST_GRACE_S)
        admin.cancel()

    async def _started(self, admin: asyncio.Task[None], stop: asyncio.Task[None]) -> bool:
        """Whether the admin answers now; it does not if a signal came. Raises what its start raised."""
        while not self._server.started:
            await asyncio.wait({admin, stop}, timeout=0.01, return_when=asyncio.FIRST_COMPLETED)
            if admin.done():
                await admin
            if admin.done() or stop.done():
                return False
        return True

    async def _taken_over(self, supervisor: Supervisor) -> bool:
        """Whether an engine was left by an admin that was killed; one of another command is ended."""
        if supervisor.adopt():
            return True
        await supervisor.stop(ENGINE_GRACE_S)
        return False

    async def _until_the_end(self, admin: asyncio.Task[None], stop: asyncio.Task[None], port: int) -> int:
        if self._engine is None or self._supervisor is None:
            self._say(f"engine: {self._settings.engine_url} (attached)")
            await asyncio.wait({admin, stop}, return_when=asyncio.FIRST_COMPLETED)
            return 0 if stop.done() else 1
        while await self._one_engine({admin, stop}, self._engine, self._supervisor, port):
            pass
        return 0 if stop.done() else 1

    async def _one_engine(
        self, ends: set[asyncio.Task[None]], engine: ManagedEngine, supervisor: Supervisor, port: int
    ) -> bool:
        """Run an engine until it ends, or has to; whether another one should follow."""
        if supervisor.running:
            self._say(f"engine: process {supervisor.pid}, taken over from an admin that was killed")
            self._was_ready = True  # once; should it be no more, another one may follow
        else:
            if not self._restarts:  # later ones get the same, also if the disk is full by then
                make_secret(engine.secret_file)
            await supervisor.start()
            self._say(f"engine: process {supervisor.pid}, log in {engine.command.log}")
        died = asyncio.create_task(supervisor.wait())
        lost = asyncio.create_task(self._lost())
        guide = asyncio.create_task(self._lead_in(engine, port))
        try:
            await asyncio.wait({*ends, died, lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (guide, lost):
                task.cancel()
            await asyncio.wait({guide, lost})
        if any(end.done() for end in ends):
            died.cancel()
            return False
        if died.done():
            self._report_death(engine, died.result())
        else:
            self._say(lost.result())
        return await self._may_restart(supervisor, ends)

    async def _may_restart(self, supervisor: Supervisor, ends: set[asyncio.Task[None]]) -> bool:
        """End what is left of the engine; whether to start another one, after a while that grows."""
        await supervisor.stop(HUNG_GRACE_S if self._service.link.hung else ENGINE_GRACE_S)
        now = time.monotonic()
        full = len(self._restarts) == RESTARTS and now - self._restarts[0] < RESTARTS_WITHIN_S
        if not self._was_ready or full:
            return False
        recent = sum(now - one < RESTARTS_WITHIN_S for one in self._restarts)
        self._restarts.append(now)
        self._service.link.expect_another()
        self._say("starting the engine again")
        await asyncio.wait(ends, timeout=RESTART_PAUSE_S * recent, return_when=asyncio.FIRST_COMPLETED)
        return not any(end.done() for end in ends)

    async def _lost(self) -> str:
        """Returns why only a new engine helps: nobody knows any more what this one runs, or it is silent."""
        link = self._service.link
        while not (link.unknown or link.hung):  # noqa: ASYNC110 - looked at beside much else, and never urgent
            await asyncio.sleep(POLL_S)
        if link.unknown:
            return "the state of the engine's weights is unknown"
        return f"the engine has answered nothing for {link.client.silent_s:.0f} s"

    async def _lead_in(self, engine: ManagedEngine, port: int) -> None:
        """Show progress until the engine is ready, then what can be tried."""
        guide = Guide(self._app, self._settings, port)
        self._service.progress = lambda: self._progress
        begun = time.monotonic()
        screen = progress_on(self._console)
        try:
            while (version := await guide.ready_version()) is None:
                line = await asyncio.to_thread(doing, engine.command.log)
                screen.update(self._hindrance() or line)
                self._progress = Progress(phase="starting", detail=line, elapsed_s=time.monotonic() - begun)
                await asyncio.sleep(POLL_S)
        finally:
            self._progress = None
            screen.close()
        again, self._was_ready = self._was_ready, True
        if again:
            self._say(f"ready again at version {version}")
            return
        try:
            lines = await guide.lines(url_of(engine.host, engine.port), engine.model, version)
        except OSError as error:
            lines = [f"ready, but the example could not be written: {error}"]
        for line in lines:
            self._say(line)

    def _hindrance(self) -> str:
        """Why the engine will not get ready by itself, if so."""
        refusal = self._service.link.refusal
        hopeless = (Code.BASE_CHANGED, Code.LEDGER_DAMAGED, Code.VERSION_LOST)
        return f"not ready: {refusal.detail}" if refusal and refusal.code in hopeless else ""

    def _report_death(self, engine: ManagedEngine, status: int | None) -> None:
        how = "" if status is None else f" with status {status}"
        lines = [f"the engine ended{how}; the end of {engine.command.log}:"]
        _log.error("%s", "\n  ".join([*lines, *last_lines(engine.command.log, LOG_LINES)]))

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        sys.stdout.flush()


async def _signalled() -> None:
    """Returns when the process is told to end."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    await told.wait()
