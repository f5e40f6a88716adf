"""The feed: every reader sees every event once and in order, or is told to begin anew."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.feed import BEAT, Feed
from schemas.events import BaselineEvent
from schemas.problems import Code, ProblemError

pytestmark = pytest.mark.anyio

Frames = AsyncGenerator[bytes, None]


def event(number: int) -> BaselineEvent:
    """An event that can be told from others."""
    return BaselineEvent(name="n", version=number)


def numbers(frames: bytes) -> list[int | None]:
    """The numbers of these events; none for a reset."""
    data = [json.loads(text) for text in re.findall(r"data: (.*)\n", frames.decode())]
    return [None if one["type"] == "reset" else int(one["version"]) for one in data]


def last_id(frames: bytes) -> str:
    """The id that a client would send when it comes back."""
    return re.findall(r"id: (.*)\n", frames.decode())[-1]


async def begun(feed: Feed, after: str | None = None) -> tuple[Frames, bytes]:
    """A stream and what it begins with, after the hello."""
    stream = feed.stream(after)
    assert (await anext(stream)).startswith(b"retry:")
    return stream, await anext(stream)


async def test_a_fresh_reader_is_told_to_read_the_state() -> None:
    """Without an id the first event is a reset, and only what comes after it follows."""
    feed = Feed(10, 1, 15)
    feed.publish(event(1))
    stream, first = await begun(feed)
    assert numbers(first) == [None]
    feed.publish(event(2))
    assert numbers(await anext(stream)) == [2]


@pytest.mark.parametrize("after", ["", "x", "00000000-1", "deadbeef-1", "-1", "1"])
async def test_ids_of_others_lead_to_a_reset(after: str) -> None:
    """What is not an id of this process is answered as if nothing had been sent."""
    feed = Feed(10, 1, 15)
    feed.publish(event(1))
    _, first = await begun(feed, after)
    assert numbers(first) == [None]


async def test_ids_of_the_future_lead_to_a_reset() -> None:
    """An id higher than any that was given out is not believed."""
    feed = Feed(10, 1, 15)
    _, first = await begun(feed)
    boot = last_id(first).partition("-")[0]
    _, second = await begun(feed, f"{boot}-5")
    assert numbers(second) == [None]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20), st.integers(1, 8))
async def test_nothing_is_missed_without_a_reset(bursts: list[int], kept: int) -> None:
    """However often a reader goes and comes back: events follow on, or a reset says that some are gone."""
    feed = Feed(kept, 1, 15)
    published, seen = 0, 0
    after: str | None = None
    for burst in bursts:
        missed = published - seen
        for _ in range(burst):
            published += 1
            feed.publish(event(published))
            missed += 1
        if after is not None and not missed:
            continue  # there is nothing to be told
        stream, frames = await begun(feed, after)
        await stream.aclose()
        expected = list(range(seen + 1, published + 1))
        fits = after is not None and missed <= kept
        assert numbers(frames) == (expected if fits else [None])
        seen, after = published, last_id(frames)


async def test_a_slow_reader_is_told_to_begin_anew() -> None:
    """Whoever falls behind what is kept gets a reset and then what comes; nothing was kept for it."""
    feed = Feed(3, 1, 15)
    stream, _ = await begun(feed)
    for number in range(4):
        feed.publish(event(number))
    assert numbers(await anext(stream)) == [None]
    feed.publish(event(9))
    assert numbers(await anext(stream)) == [9]


async def test_silence_is_filled_with_comments() -> None:
    """Readers and whatever is between see that the stream lives."""
    stream, _ = await begun(Feed(3, 1, 0.01))
    assert await anext(stream) == BEAT


async def test_closing_ends_every_stream() -> None:
    """Those that wait, and those that come later."""
    feed = Feed(3, 2, 15)
    stream, _ = await begun(feed)
    waiting = asyncio.ensure_future(anext(stream, None))
    await asyncio.sleep(0)
    feed.close()
    assert await waiting is None
    assert [frames async for frames in feed.stream(None)] == [b"retry: 1000\n\n"]


def test_readers_are_counted_and_bounded() -> None:
    """One more than allowed is refused, and room is made by leaving."""
    feed = Feed(3, 1, 15)
    with feed.reader():
        assert feed.readers == 1
        with pytest.raises(ProblemError) as refusal, feed.reader():
            pass
        assert refusal.value.code is Code.TOO_MANY_READERS
    with feed.reader():
        pass
    assert feed.readers == 0
