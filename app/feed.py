"""The feed of events: the latest are kept, and every reader goes along them at a pace of its own."""

import asyncio
import re
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from itertools import islice

from schemas.events import Event, ResetEvent
from schemas.problems import Code, ProblemError

_ID = re.compile(r"([0-9a-f]{8})-([0-9]{1,18})")
HELLO = b"retry: 1000\n\n"
"""Tells how many milliseconds to wait before connecting again."""
BEAT = b":\n\n"
"""A comment, which shows both sides that the other is still there."""


class Feed:
    """Keeps the latest `kept` events as they go over the wire. Used from the event loop only.

    A reader holds no events of its own but a place among these; one that is so slow
    that its place is gone is told to begin anew.
    """

    def __init__(self, kept: int, readers: int, beat_s: float) -> None:
        self.readers = 0
        """How many follow the feed now."""
        self._most = readers
        self._beat_s = beat_s
        self._boot = secrets.token_hex(4)  # so that ids of another process are noticed
        self._frames: deque[bytes] = deque(maxlen=kept)
        self._last = 0
        self._more = asyncio.Event()
        self._closed = False

    def publish(self, event: Event) -> None:
        """Tell all readers; nobody is waited for."""
        self._last += 1
        self._frames.append(self._frame(event))
        self._wake()

    def close(self) -> None:
        """End every stream, so that none keeps the service from ending."""
        self._closed = True
        self._wake()

    @contextmanager
    def reader(self) -> Iterator[None]:
        """Room for one reader while it lasts. Raises too_many_readers."""
        if self.readers >= self._most:
            raise ProblemError(Code.TOO_MANY_READERS, f"{self.readers} streams of events are open.")
        self.readers += 1
        try:
            yield
        finally:
            self.readers -= 1

    async def stream(self, after: str | None) -> AsyncGenerator[bytes, None]:
        """Frames of all events after the one of that id, for ever.

        Begins with `reset` if there is no id, or none that what is kept goes on from.
        """
        yield HELLO
        at = self._place(after)
        while not self._closed:
            more = self._more
            if at is None or not self._kept(at):
                at = self._last
                yield self._frame(ResetEvent())
            elif at < self._last:
                frames = b"".join(islice(self._frames, len(self._frames) - (self._last - at), None))
                at = self._last
                yield frames
            elif not await self._within_beat(more):
                yield BEAT

    def _place(self, id: str | None) -> int | None:
        """The number of an event of this process, if the id is one."""
        parts = _ID.fullmatch(id or "")
        return int(parts[2]) if parts and parts[1] == self._boot else None

    def _kept(self, at: int) -> bool:
        """Whether all events after number `at` are there."""
        return self._last - len(self._frames) <= at <= self._last

    def _frame(self, event: Event) -> bytes:
        text = f"id: {self._boot}-{self._last}\nevent: {event.type}\ndata: {event.model_dump_json()}\n\n"
        return text.encode()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    async def _within_beat(self, more: asyncio.Event) -> bool:
        try:
            async with asyncio.timeout(self._beat_s):
                await more.wait()
        except TimeoutError:
            return False
        return True
