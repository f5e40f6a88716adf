"""Runs the admin, and in managed mode the engine with it, in the foreground until told to stop."""

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from rich.console import Console

from app.engine_log import doing, last_lines
from app.guide import Guide
from app.listen import listen, require_free, url_of
from app.progress import progress_on
from app.settings import Settings
from app.supervisor import EngineCommand, Supervisor, make_secret
from schemas.status import Progress

ADMIN_GRACE_S = 25
"""For what the admin is doing when the end comes: a commit finishes or is undone."""
ENGINE_GRACE_S = 20
"""For vLLM to end by itself."""
LAST_GRACE_S = 5
"""For whoever still waited for the engine. All three stay below the minute in which a service must end."""
POLL_S = 0.5
LOG_LINES = 30


@dataclass(frozen=True)
class ManagedEngine:
    """The engine to start: what the user called the model, where it listens, how it is run."""

    model: str
    host: str
    port: int
    secret_file: Path
    command: EngineCommand


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
        self._supervisor = Supervisor(engine.command) if engine else None
        self._progress: Progress | None = None
        self._server = _Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=ADMIN_GRACE_S,
            )
        )

    async def run(self) -> int:
        """Serve until a signal comes or a part ends by itself; returns the exit status.

        Raises AddressError if an address is taken.
        """
        stop = asyncio.create_task(_signalled())
        if self._engine:
            require_free(self._engine.host, self._engine.port)
        listener = listen(self._settings.host, self._settings.port)
        admin = asyncio.create_task(self._server.serve(sockets=[listener]))
        try:
            if not await self._started(admin, stop):
                return 0 if stop.done() else 1
            self._say(f"admin: {url_of(self._settings.host, listener.getsockname()[1])}")
            return await self._until_the_end(admin, stop, listener.getsockname()[1])
        finally:
            await self._end(admin)
            stop.cancel()

    async def _end(self, admin: asyncio.Task[None]) -> None:
        self._server.should_exit = True
        await asyncio.wait({admin}, timeout=ADMIN_GRACE_S)
        if self._supervisor:
            await self._supervisor.stop(ENGINE_GRACE_S)
        await asyncio.wait({admin}, timeout=LAST_GRACE_S)
        admin.cancel()

    async def _started(self, admin: asyncio.Task[None], stop: asyncio.Task[None]) -> bool:
        """Whether the admin answers now; it does not if its start failed or a signal came."""
        while not self._server.started:
            await asyncio.wait({admin, stop}, timeout=0.01, return_when=asyncio.FIRST_COMPLETED)
            if admin.done() or stop.done():
                return False
        return True

    async def _until_the_end(self, admin: asyncio.Task[None], stop: asyncio.Task[None], port: int) -> int:
        ends: set[asyncio.Task[None] | asyncio.Task[int]] = {admin, stop}
        if self._engine is None or self._supervisor is None:
            self._say(f"engine: {self._settings.engine_url} (attached)")
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return 0 if stop.done() else 1
        make_secret(self._engine.secret_file)
        await self._supervisor.start()
        self._say(f"engine: process {self._supervisor.pid}, log in {self._engine.command.log}")
        died = asyncio.create_task(self._supervisor.wait())
        guide = asyncio.create_task(self._lead_in(self._engine, port))
        try:
            await asyncio.wait({*ends, died}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            guide.cancel()
            await asyncio.wait({guide})
        if died.done() and not stop.done():
            self._report_death(self._engine, died.result())
        died.cancel()
        return 0 if stop.done() else 1

    async def _lead_in(self, engine: ManagedEngine, port: int) -> None:
        """Show progress until the engine is ready, then what can be tried."""
        guide = Guide(self._app, self._settings, port)
        self._app.state.service.progress = lambda: self._progress
        begun = time.monotonic()
        screen = progress_on(self._console)
        try:
            while (version := await guide.ready_version()) is None:
                line = await asyncio.to_thread(doing, engine.command.log)
                screen.update(line)
                self._progress = Progress(phase="starting", detail=line, elapsed_s=time.monotonic() - begun)
                await asyncio.sleep(POLL_S)
        finally:
            self._progress = None
            screen.close()
        try:
            lines = await guide.lines(url_of(engine.host, engine.port), engine.model, version)
        except OSError as error:
            lines = [f"ready, but the example could not be written: {error}"]
        for line in lines:
            self._say(line)

    def _report_death(self, engine: ManagedEngine, status: int) -> None:
        errors = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
        errors.print(f"the engine ended with status {status}; the end of {engine.command.log}:")
        for line in last_lines(engine.command.log, LOG_LINES):
            errors.print(f"  {line}")

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
