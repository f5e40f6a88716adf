"""A reader of the stream of events, over a socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

Json = dict[str, Any]


class Reader:
    """What has arrived of one stream; `ids` and `events` in step, comments counted."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.ids: list[str] = []
        self.events: list[Json] = []
        self.names: list[str] = []
        self.beats = 0
        self.ended = False
        self._more = asyncio.Event()

    async def read(self) -> None:
        """Take what comes until the stream ends."""
        async for line in self.response.aiter_lines():
            field, _, value = line.partition(": ")
            if field == "id":
                self.ids.append(value)
            elif field == "event":
                self.names.append(value)
            elif field == "data":
                self.events.append(json.loads(value))
            elif line == ":":
                self.beats += 1
            self._more.set()
        self.ended = True
        self._more.set()

    async def until(self, *types: str, count: int = 1) -> list[Json]:
        """All events, once `count` of these types are among them; at most 5 s."""
        async with asyncio.timeout(5):
            while sum(one["type"] in types for one in self.events) < count:
                self._more.clear()
                await self._more.wait()
        return self.events

    def of(self, *types: str) -> list[Json]:
        """The events of these types."""
        return [one for one in self.events if one["type"] in types]


@asynccontextmanager
async def reading(port: int, after: str | None = None, **headers: str) -> AsyncIterator[Reader]:
    """A reader that goes on after the event of that id."""
    if after is not None:
        headers["last-event-id"] = after
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as http,
        http.stream("GET", "/v1/events", headers=headers) as response,
    ):
        assert response.status_code == 200, await response.aread()
        reader = Reader(response)
        task = asyncio.create_task(reader.read())
        try:
            yield reader
        finally:
            task.cancel()
            await asyncio.wait({task})
