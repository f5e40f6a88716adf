"""The clients' streams of events, waiting and async, over a real socket that breaks."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from httpx_sse import ServerSentEvent

from app.client import AsyncClient, BadAnswer, Client, Refused, Retry, Told, Unreachable
from app.remote.events import Course
from schemas.events import BaselineEvent, ResetEvent, UploadEvent, VersionEvent
from schemas.problems import Code
from tests.app.cutting import Cut, Proxy, cutting
from tests.app.sockets import served
from tests.fakes.admin import Admin, running, until

pytestmark = pytest.mark.anyio

QUICK = Retry(times=5, pause_s=0.01)


@pytest.fixture(params=["waiting", "awaiting"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which of the two clients."""
    return str(request.param)


class Follower:
    """What one client is told, in a thread of its own if it waits."""

    def __init__(self, proxy: Proxy, token: str | None, options: dict[str, Any]) -> None:
        self.told: list[Told] = []
        self.troubles: list[Unreachable | None] = []
        self.raised: Exception | None = None
        self.client = Client(f"http://127.0.0.1:{proxy.port}", token, retry=QUICK)
        self._url, self._token = f"http://127.0.0.1:{proxy.port}", token
        self._options = {"connection": self.troubles.append, **options}

    @property
    def baselines(self) -> list[str]:
        """Names of baselines, in the order in which they were told."""
        return [told.event.name for told in self.told if isinstance(told.event, BaselineEvent)]

    @property
    def resets(self) -> int:
        return sum(isinstance(told.event, ResetEvent) for told in self.told)

    async def awaiting(self) -> None:
        try:
            async with (
                AsyncClient(self._url, self._token, retry=QUICK) as client,
                aclosing(client.events(**self._options)) as stream,
            ):
                async for told in stream:
                    self.told.append(told)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.raised = error

    def waiting(self) -> None:
        try:
            for told in self.client.events(**self._options):
                self.told.append(told)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.raised = error


@asynccontextmanager
async def following(
    kind: str, proxy: Proxy, token: str | None = None, **options: Any
) -> AsyncIterator[Follower]:
    """A client of this kind that follows what is behind the proxy."""
    follower = Follower(proxy, token, options)
    work = follower.awaiting() if kind == "awaiting" else asyncio.to_thread(follower.waiting)
    task = asyncio.create_task(work)
    try:
        yield follower
    finally:
        follower.client.close()  # a closed one connects no more
        if kind == "awaiting":
            task.cancel()
        while not task.done():
            proxy.cut()
            await asyncio.wait({task}, timeout=0.05)


async def named(admin: Admin, *names: str) -> None:
    """Make baselines, which are an event each."""
    for name in names:
        (await admin.http.put(f"/v1/baselines/{name}")).raise_for_status()


async def test_events_come_typed(tmp_path: Path, kind: str) -> None:
    """`reset` first, then what happens, each as its model with its id and the JSON that came."""
    async with (
        running(tmp_path) as admin,
        served(admin) as port,
        cutting(port) as proxy,
        following(kind, proxy) as follower,
    ):
        await until(lambda: follower.resets == 1)
        await admin.commit(label="first")
        await until(lambda: any(isinstance(told.event, VersionEvent) for told in follower.told))
        (version,) = (told.event.version for told in follower.told if isinstance(told.event, VersionEvent))
        assert (version.version, version.label) == (1, "first")
        assert any(isinstance(told.event, UploadEvent) for told in follower.told)
        for told in follower.told:
            assert told.event.model_dump(mode="json") == json.loads(told.text)
        assert (
            len({told.id for told in follower.told}) >= len(follower.told) - 1
        )  # a reset's is the last one's
        assert follower.troubles == []


async def test_a_lost_connection_is_made_anew(tmp_path: Path, kind: str) -> None:
    """Whatever happens while it is away is told afterwards, once, in order, without a reset."""
    async with (
        running(tmp_path) as admin,
        served(admin) as port,
        cutting(port) as proxy,
        following(kind, proxy) as follower,
    ):
        await until(lambda: follower.resets == 1)
        await named(admin, "a", "b")
        await until(lambda: follower.baselines == ["a", "b"])
        proxy.plan.append(Cut.ANSWER)
        proxy.cut()
        await named(admin, "c", "d")
        await until(lambda: follower.baselines[-1] == "d" and len(follower.troubles) > 1, 20)
        await named(admin, "e")
        await until(lambda: follower.baselines[-1] == "e")
        assert follower.baselines == ["a", "b", "c", "d", "e"]
        assert follower.resets == 1
        assert isinstance(follower.troubles[0], Unreachable)
        assert follower.troubles[-1] is None


async def test_a_stream_that_is_cut_within_an_event(tmp_path: Path, kind: str) -> None:
    """Half an event is none: it comes whole on the next connection."""
    async with running(tmp_path) as admin, served(admin) as port:
        async with cutting(port) as proxy, following(kind, proxy) as follower:
            await until(lambda: follower.resets == 1)
            first = follower.told[0].id
        await named(admin, "a", "b", "c", "d", "e", "f", "g", "h")
        async with (
            cutting(port, Cut.WITHIN_ANSWER) as proxy,
            following(kind, proxy, last_event_id=first) as follower,
        ):
            await until(lambda: len(follower.baselines) == 8, 20)
            assert follower.baselines == list("abcdefgh")
            assert follower.resets == 0
            assert proxy.connections == 2


async def test_a_service_that_goes_and_comes_back(tmp_path: Path, kind: str) -> None:
    """A restart: trouble is told once, then that there is a connection, then a reset."""
    async with cutting(1) as proxy:
        async with running(tmp_path) as admin, served(admin) as port:
            proxy.behind = port
            context = following(kind, proxy)
            follower = await context.__aenter__()
            await until(lambda: follower.resets == 1)
            admin.service.feed.close()
            proxy.behind = 1
            await until(lambda: follower.troubles)
        async with running(tmp_path) as admin, served(admin) as port:
            proxy.behind = port
            await until(lambda: follower.resets == 2, 20)
            assert isinstance(follower.troubles[0], Unreachable)
            assert follower.troubles[1:] == [None]
            await context.__aexit__(None, None, None)


async def test_refusals_are_raised(tmp_path: Path, kind: str) -> None:
    """A wrong token, and no room for one more reader, are not tried again."""
    settings = {"token": "s3cret", "event_readers": 1}
    async with running(tmp_path, **settings) as admin, served(admin) as port, cutting(port) as proxy:
        async with following(kind, proxy, token="wrong") as refused:
            await until(lambda: refused.raised)
        async with following(kind, proxy, token="s3cret") as first:
            await until(lambda: first.resets == 1)
            async with following(kind, proxy, token="s3cret") as second:
                await until(lambda: second.raised)
    assert isinstance(refused.raised, Refused)
    assert refused.raised.code == Code.UNAUTHORIZED
    assert isinstance(second.raised, Refused)
    assert (second.raised.status, second.raised.code) == (429, Code.TOO_MANY_READERS)
    assert (refused.troubles, second.troubles) == ([], [])


async def test_comments_alone_keep_a_stream(tmp_path: Path, kind: str) -> None:
    """Nothing happens for longer than silence may last, but the service says that it is there."""
    async with (
        running(tmp_path, event_beat_s=0.05, event_look_s=60) as admin,
        served(admin) as port,
        cutting(port) as proxy,
        following(kind, proxy, silence_s=0.5) as follower,
    ):
        await until(lambda: follower.resets == 1)
        await asyncio.sleep(1)
        assert (proxy.connections, follower.troubles) == (1, [])


async def test_silence_is_a_lost_connection(tmp_path: Path, kind: str) -> None:
    """A stream without even a comment is left for a new one, which goes on where it was."""
    async with (
        running(tmp_path, event_beat_s=60) as admin,
        served(admin) as port,
        cutting(port) as proxy,
        following(kind, proxy, silence_s=0.5) as follower,
    ):
        await until(lambda: proxy.connections > 1 and follower.troubles[-1] is None, 20)
        await named(admin, "heard")
        await until(lambda: follower.baselines == ["heard"])
        assert isinstance(follower.troubles[0], Unreachable)
        assert follower.resets == 1


def stream_of(*frames: bytes) -> bytes:
    """A stream that ends after these frames."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    return head + b"".join(frame + b"\n\n" for frame in frames)


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[tuple[Proxy, list[bytes]]]:
    """A proxy before a server that gives these answers, a connection each; and what it was asked."""
    left = list(answers)
    asked: list[bytes] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        if left:
            writer.write(left.pop(0))
            await writer.drain()
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with cutting(server.sockets[0].getsockname()[1]) as proxy:
        try:
            yield proxy, asked
        finally:
            server.close()


async def test_types_of_a_newer_service_are_passed_over(kind: str) -> None:
    """An unknown type is no trouble, and not asked for again; unknown fields stand in the text."""
    frames = (
        b'id: x-1\nevent: weather\ndata: {"type":"weather"}',
        b'id: x-2\nevent: baseline\ndata: {"type":"baseline","name":"n","version":"3","by":"me"}',
        b'id: x-3\nevent: weather\ndata: {"type":"weather"}',
    )
    async with answering(stream_of(*frames)) as (proxy, asked), following(kind, proxy) as follower:
        await until(lambda: len(asked) == 2)
        assert [(told.id, follower.baselines, "me" in told.text) for told in follower.told] == [
            ("x-2", ["n"], True)
        ]
        assert b"last-event-id: x-3\r\n" in asked[1].lower()
        assert follower.raised is None


@pytest.mark.parametrize(
    "answer",
    [
        stream_of(b'id: x-1\nevent: baseline\ndata: {"type":"baseline"}'),
        stream_of(b"id: x-1\ndata: hello"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: text/html\r\n\r\nhi",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nhi",
    ],
)
async def test_what_is_not_graft_is_said(kind: str, answer: bytes) -> None:
    """Events without sense, another content type and another's refusal end it as BadAnswer."""
    async with answering(answer) as (proxy, _), following(kind, proxy) as follower:
        await until(lambda: follower.raised)
    assert isinstance(follower.raised, BadAnswer)


async def test_a_proxy_without_anybody_behind_is_waited_for(kind: str) -> None:
    """502 from what is no Graft, as from nginx while the service restarts, is a lost connection."""
    bad = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"
    frame = b'id: x-1\nevent: reset\ndata: {"type":"reset"}'
    async with answering(bad, bad, stream_of(frame)) as (proxy, _), following(kind, proxy) as follower:
        await until(lambda: follower.resets == 1)
        assert isinstance(follower.troubles[0], Unreachable)
        assert follower.troubles[1] is None


async def test_the_wait_is_as_the_service_asks() -> None:
    """`retry` of the stream is the pause before the next connection; it grows to a bound and no further."""
    course = Course(None, QUICK, lambda trouble: None)
    assert course.told(ServerSentEvent(retry=1000)) is None
    assert [course.ended() for _ in range(6)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    course.told(ServerSentEvent(id="x-1", data='{"type":"reset"}'))
    assert course.ended() == 1.0


def test_an_address_of_another_scheme_is_unreachable() -> None:
    """What another connection would not mend is raised, not tried for ever."""
    with Client("gopher://127.0.0.1", retry=QUICK) as client, pytest.raises(Unreachable):
        next(client.events())
