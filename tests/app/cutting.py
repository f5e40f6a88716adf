"""A proxy on loopback that cuts connections where a test wants it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum


class Cut(Enum):
    """What happens to a connection."""

    NOT = "not"
    BEFORE = "before anything of the request is passed on"
    WITHIN = "in the middle of the request"
    ANSWER = "when the answer comes, of which nothing is passed on"
    WITHIN_ANSWER = "in the middle of the answer"


@dataclass
class Proxy:
    """Connections are cut as `plan` says, in order; later ones are not."""

    behind: int
    port: int = 0
    plan: deque[Cut] = field(default_factory=deque)
    connections: int = 0
    open: set[asyncio.StreamWriter] = field(default_factory=set)

    def cut(self) -> None:
        """Cut every connection that is open."""
        for writer in self.open:
            writer.transport.abort()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on, as far as it goes."""
        self.connections += 1
        cut = self.plan.popleft() if self.plan else Cut.NOT
        if cut is Cut.BEFORE:
            await reader.read(1)
            writer.close()
            return
        try:
            to_server = await asyncio.open_connection("127.0.0.1", self.behind)
        except OSError:
            writer.close()
            return
        self.open.add(writer)
        forth = asyncio.create_task(_pass(reader, to_server[1], 400 if cut is Cut.WITHIN else None))
        limit = {Cut.ANSWER: 0, Cut.WITHIN_ANSWER: 300}.get(cut)
        back = asyncio.create_task(_pass(to_server[0], writer, limit))
        await asyncio.wait({forth, back}, return_when=asyncio.FIRST_COMPLETED)
        self.open.discard(writer)
        for task in (forth, back):
            task.cancel()
        for stream in (to_server[1], writer):
            stream.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None) -> None:
    """Copy until the end, or until there are more than `limit` bytes."""
    passed = 0
    while chunk := await reader.read(1 << 16):
        if limit is not None and passed + len(chunk) > limit:
            writer.write(chunk[: limit - passed])
            await writer.drain()
            return
        passed += len(chunk)
        writer.write(chunk)
        await writer.drain()


@asynccontextmanager
async def cutting(behind: int, *plan: Cut) -> AsyncIterator[Proxy]:
    """A proxy before the server on port `behind`."""
    proxy = Proxy(behind, plan=deque(plan))
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
