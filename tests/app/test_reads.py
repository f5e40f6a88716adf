"""Pieces of bodies: put together in order, and no more of them kept than is said."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from app.reads import READ_NBYTES, LargeReads


class Flow:
    """Notes whether reading was paused."""

    paused = False

    def pause_reading(self) -> None:
        self.paused = True


@pytest.fixture
def protocol() -> Any:
    """A protocol in the middle of a body, without a connection."""
    made: Any = LargeReads.__new__(LargeReads)
    made.parser = SimpleNamespace(should_upgrade=lambda: False)
    made.flow = Flow()
    set_event: Callable[[], None] = lambda: None  # noqa: E731
    made.cycle = SimpleNamespace(
        body=bytearray(), response_complete=False, message_event=SimpleNamespace(set=set_event)
    )
    return made


def test_pieces_are_put_together_in_order(protocol: Any) -> None:
    """What uvicorn asks for with `bytes` and `len` is all that came, and a new body begins empty."""
    for piece in (b"ab", b"", b"cde"):
        protocol.on_body(piece)
    assert bytes(protocol.cycle.body) == b"abcde" and len(protocol.cycle.body) == 5
    protocol.cycle.body = bytearray()
    protocol.on_body(b"f")
    assert bytes(protocol.cycle.body) == b"f"


def test_what_uvicorn_kept_before_comes_first(protocol: Any) -> None:
    """Bytes that lie in uvicorn's own buffer are not lost."""
    protocol.cycle.body = bytearray(b"first ")
    protocol.on_body(b"second")
    assert bytes(protocol.cycle.body) == b"first second"


def test_reading_pauses_when_enough_waits(protocol: Any) -> None:
    """A sender that is faster than the disk fills no memory."""
    protocol.on_body(bytes(READ_NBYTES - 1))
    assert not protocol.flow.paused
    protocol.on_body(b"x")
    assert protocol.flow.paused


def test_nothing_is_kept_after_the_answer(protocol: Any) -> None:
    """Bytes of a request that has been answered are dropped, as uvicorn does."""
    protocol.cycle.response_complete = True
    protocol.on_body(b"late")
    assert bytes(protocol.cycle.body) == b""
