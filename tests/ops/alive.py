"""An admin before a fake engine on a real socket, in a thread: for tests of commands, which wait."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.app.sockets import served
from tests.fakes.admin import Admin, running
from tests.fakes.checkpoint import write_checkpoint
from tests.fakes.engine import FakeEngine


@dataclass
class Alive:
    """A running admin, where it listens, and the folder of its models."""

    admin: Admin
    port: int
    models: Path
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> FakeEngine:
        return self.admin.engine


@contextmanager
def alive(root: Path, port: int = 0, **settings: Any) -> Iterator[Alive]:
    """Run it until the end of the context, on any port or this one."""
    started: list[Alive] = []
    ready, end = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        engine = FakeEngine()
        engine.checkpoint = str(write_checkpoint(root / "models" / "served"))
        async with running(root / "state", engine=engine, **settings) as admin, served(admin, port) as at:
            started.append(Alive(admin, at, root / "models", loop))
            ready.set()
            await end.wait()
            admin.service.feed.close()  # else the server would wait for its readers

    def work() -> None:
        try:
            loop.run_until_complete(run())
        finally:
            ready.set()
            loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    assert started, "the admin did not start"
    try:
        yield started[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
