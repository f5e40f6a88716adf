"""`GET /v1/events` over a socket: what is told of what happens, and to whom."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from pydantic import TypeAdapter

from schemas.events import Event
from schemas.problems import Code
from schemas.status import Progress
from tests.app.reader import reading
from tests.app.sockets import head, send, served
from tests.fakes.admin import OCTETS, expert_body, running, until

pytestmark = pytest.mark.anyio


async def test_a_commit_is_told_step_by_step(tmp_path: Path) -> None:
    """Open, upload, prepare, commit: states in their order, the version with its figures, all as typed."""
    async with running(tmp_path) as admin, served(admin) as port, reading(port) as reader:
        await reader.until("reset")
        await admin.commit(label="first")
        await reader.until("version")
        await until(lambda: reader.of("transaction")[-1]["state"] == "committed")
        states = [one["state"] for one in reader.of("transaction")]
        assert states == ["open", "open", "preparing", "prepared", "committing", "committed"]
        assert [one["uploads"] for one in reader.of("transaction")][:2] == [0, 1]
        assert reader.of("transaction")[-1]["version"] == "1"
        begun, ended = reader.of("upload")
        assert (begun["state"], ended["state"]) == ("receiving", "accepted")
        assert begun["id"] == ended["id"]
        assert ended["received"] == ended["nbytes"] == len(expert_body())
        assert (ended["layer"], ended["expert"]) == (0, 0)
        (version,) = (one["version"] for one in reader.of("version"))
        assert (version["version"], version["kind"], version["label"]) == ("1", "commit", "first")
        assert version["timing"]["pause_ms"] == 2.0
        assert version["nbytes"]["uploaded"] == len(expert_body())
        listed = (await admin.http.get("/v1/versions")).json()["versions"]
        assert listed[-1] == version
        adapter: TypeAdapter[Event] = TypeAdapter(Event)
        for name, one in zip(reader.names, reader.events, strict=True):
            assert adapter.validate_python(one).type == name


async def test_rollbacks_baselines_and_operations_are_told(tmp_path: Path) -> None:
    """A rollback as an operation says what came of it; names come and go."""
    async with running(tmp_path) as admin, served(admin) as port, reading(port) as reader:
        await admin.commit()
        await admin.http.put("/v1/baselines/good")
        await admin.http.delete("/v1/baselines/good")
        await admin.http.post("/v1/rollback", json={"to_version": 0}, headers={"prefer": "respond-async"})
        await reader.until("operation", count=2)
        assert [(one["name"], one["version"]) for one in reader.of("baseline")] == [
            ("good", "1"),
            ("good", None),
        ]
        running_, done = reader.of("operation")
        assert (running_["operation"]["state"], running_["version"]) == ("running", None)
        assert (done["operation"]["state"], done["version"]) == ("done", "2")
        assert reader.of("version")[-1]["version"]["restores"] == "0"


async def test_failures_are_told(tmp_path: Path) -> None:
    """A refused body with its code; a transaction that failed with its problem; one that was aborted."""
    async with running(tmp_path) as admin, served(admin) as port, reading(port) as reader:
        refused = await admin.http.put("/v1/experts/0/1", content=b"12345678" * 4, headers=OCTETS)
        assert refused.status_code == 422
        admin.engine.faults.commit[0] = "before"
        await admin.commit()
        await admin.http.delete(await admin.open())
        await reader.until("transaction", count=8)
        first = next(one for one in reader.of("upload") if one["state"] != "receiving")
        assert (first["state"], first["expert"]) == ("refused", 1)
        assert Code(first["code"]) is Code.HEADER_LENGTH
        ended = [one for one in reader.of("transaction") if one["state"] in ("failed", "aborted")]
        assert [one["state"] for one in ended] == ["failed", "aborted"]
        assert ended[0]["problem"]["code"] == "commit_undone"


async def test_a_body_is_told_while_it_arrives(tmp_path: Path) -> None:
    """Some events say how far it has come; a client that goes away is told as such."""
    async with running(tmp_path) as admin, served(admin) as port, reading(port) as reader:
        content = expert_body()

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(content) - 100, 100):
                yield content[at : at + 100]
                await asyncio.sleep(0.25 if at < 300 else 0)
            raise ConnectionError

        with pytest.raises(ConnectionError):
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                await http.put("/v1/experts/1/2", content=pieces(), headers=OCTETS)
        await until(lambda: reader.of("upload")[-1]["state"] == "refused")
        received = [one["received"] for one in reader.of("upload")]
        assert len(received) >= 4
        assert received == sorted(received)
        assert 0 < received[1] < received[-1]
        assert reader.of("upload")[-1]["code"] == "client_gone"


async def test_events_say_when_they_happened(tmp_path: Path) -> None:
    """Each has its time, in their order and with its zone, and a later reader gets the same."""
    async with running(tmp_path) as admin, served(admin) as port, reading(port) as reader:
        await admin.commit()
        await reader.until("version")
        told = [datetime.fromisoformat(one["at"]) for one in reader.events]
        assert told == sorted(told)
        assert told[0] < told[-1]
        assert told[-1] <= datetime.now(UTC)
        async with reading(port, after=reader.ids[0]) as again:
            await again.until("version")
            shared = min(len(again.events), len(reader.events) - 1)
            assert again.events[:shared] == reader.events[1 : 1 + shared]


async def test_engine_and_budgets_are_told_when_they_change(tmp_path: Path) -> None:
    """How they stand at first, then only changes; the seconds of a start are none."""
    settings = {"event_look_s": 0.01}
    async with running(tmp_path, **settings) as admin, served(admin) as port, reading(port) as reader:
        await reader.until("storage")
        await asyncio.sleep(0.1)
        assert len(reader.of("engine")) == len(reader.of("storage")) == 1
        assert reader.of("engine")[0]["writable"] is True
        admin.line.cuts["*"] = "refused"
        await until(lambda: reader.of("engine")[-1]["engine"]["reachable"] is False)
        admin.line.cuts.clear()
        await until(lambda: reader.of("engine")[-1]["writable"] is True)
        await admin.upload(await admin.open())
        await until(lambda: reader.of("storage")[-1]["storage"]["staged"]["used"] == len(expert_body()))
        seconds = iter(range(1000))
        admin.service.progress = lambda: Progress(phase="loading", elapsed_s=next(seconds))
        await until(lambda: reader.of("engine")[-1]["engine"]["progress"])
        count = len(reader.of("engine"))
        await asyncio.sleep(0.1)
        assert len(reader.of("engine")) == count


async def test_a_reader_that_comes_back_misses_nothing(tmp_path: Path) -> None:
    """With the last id it had, it gets what happened meanwhile; after a restart, a reset."""
    async with running(tmp_path) as admin, served(admin) as port:
        async with reading(port) as reader:
            await admin.commit()
            await reader.until("version")
            last = reader.ids[-1]
        await admin.commit(seed=2)
        async with reading(port, after=last) as again:
            await again.until("version")
            assert "reset" not in again.names
            assert again.of("version")[0]["version"]["version"] == "2"
    async with running(tmp_path) as admin, served(admin) as port, reading(port, after=last) as reader:
        assert (await reader.until("reset"))[0]["type"] == "reset"


async def test_readers_that_leave_leave_nothing(tmp_path: Path) -> None:
    """A closed connection is noticed at once, and makes room where that is bounded."""
    async with running(tmp_path, event_readers=1) as admin, served(admin) as port:
        async with reading(port) as reader:
            await reader.until("reset")
            refused = await admin.http.get("/v1/events")
            assert (refused.status_code, refused.json()["code"]) == (429, "too_many_readers")
        await until(lambda: admin.service.feed.readers == 0)
        async with reading(port) as reader:
            await reader.until("reset")


async def test_readers_that_come_at_once_are_bounded(tmp_path: Path) -> None:
    """As many as are allowed get a stream, however close together the requests are."""
    async with running(tmp_path, event_readers=2) as admin, served(admin) as port:
        streams = await asyncio.gather(*(send(port, head("GET", "/v1/events")) for _ in range(8)))
        answers = await asyncio.gather(*(reader.readline() for reader, _ in streams))
        assert sorted(line.split()[1] for line in answers) == [b"200"] * 2 + [b"429"] * 6
        for _, writer in streams:
            writer.close()
        await until(lambda: admin.service.feed.readers == 0)


async def test_what_the_status_says_is_no_secret_to_readers(tmp_path: Path) -> None:
    """Whoever read the state while it was otherwise for a moment is told when it is as before again."""
    async with running(tmp_path, event_look_s=60) as admin, served(admin) as port, reading(port) as reader:
        await reader.until("reset")
        await admin.http.get("/v1/status")
        await reader.until("engine")
        admin.service.progress = lambda: Progress(phase="loading")
        assert (await admin.http.get("/v1/status")).json()["engine"]["progress"]["phase"] == "loading"
        admin.service.progress = lambda: None
        await admin.http.get("/v1/status")
        await reader.until("engine", count=3)
        phases = [
            one["engine"]["progress"] and one["engine"]["progress"]["phase"] for one in reader.of("engine")
        ]
        assert phases == [None, "loading", None]


async def test_a_refusal_that_is_repeated_is_told_as_one(tmp_path: Path) -> None:
    """The same request again, under its key, gets the first answer; the upload counts as refused again."""
    async with running(tmp_path) as admin, served(admin) as port, reading(port) as reader:
        for _ in range(2):
            headers = {**OCTETS, "idempotency-key": "k"}
            answer = await admin.http.put(
                "/v1/experts/0/1", content=expert_body()[:-8] + b"\xff" * 8, headers=headers
            )
            assert answer.status_code == 422
        await reader.until("upload", count=4)
        ended = [(one["state"], one["code"]) for one in reader.of("upload") if one["state"] != "receiving"]
        assert ended == [("refused", answer.json()["code"])] * 2


async def test_the_history_of_an_earlier_process_is_not_told_as_news(tmp_path: Path) -> None:
    """What is read from the ledger at the start is state, not events."""
    async with running(tmp_path) as admin:
        await admin.commit()
    async with running(tmp_path) as admin, served(admin) as port, reading(port) as reader:
        await reader.until("storage")
        assert not reader.of("version", "transaction")


async def test_events_need_the_token(tmp_path: Path) -> None:
    """As any other route; nothing of it goes into the address."""
    async with running(tmp_path, token="s3cret") as admin, served(admin) as port:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            assert (await http.get("/v1/events?token=s3cret")).status_code == 401
        async with reading(port, authorization="Bearer s3cret") as reader:
            assert reader.response.headers["content-type"].startswith("text/event-stream")
            assert reader.response.headers["cache-control"] == "no-store"


async def test_a_server_that_ends_ends_its_streams(tmp_path: Path) -> None:
    """Once the feed is closed, a server that waits for its connections has none to wait for."""
    async with running(tmp_path) as admin, served(admin) as port, reading(port) as reader:
        await reader.until("reset")
        admin.service.feed.close()
        await until(lambda: reader.ended)
