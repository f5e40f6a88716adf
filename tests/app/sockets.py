"""The admin behind a real socket, and requests sent to it byte by byte."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from tests.fakes.admin import Admin, until

OCTET_LINE = "Content-Type: application/octet-stream"


@asynccontextmanager
async def served(admin: Admin, port: int = 0) -> AsyncIterator[int]:
    """The admin's app on a loopback port as well; its lifespan is run by `running`."""
    config = uvicorn.Config(admin.app, host="127.0.0.1", port=port, lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


def head(method: str, path: str, *lines: str) -> bytes:
    """The head of a request."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *lines, "", ""]).encode()


async def send(port: int, content: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect and send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(content)
    await writer.drain()
    return reader, writer
