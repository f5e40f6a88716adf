"""Clients that go away, over real sockets: nothing half done, nothing left, nothing lost."""

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from app.main import create_app
from app.settings import Settings
from tests.app.sockets import OCTET_LINE, head, send, served
from tests.fakes.admin import asleep, expert_body, running, until
from tests.fakes.engine import FakeEngine, Line

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("framing", ["Content-Length: 100", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("path", ["{t}/experts/0/0", "{t}/patches", "/v1/experts/0/0", "/v1/patches"])
async def test_gone_within_the_body(tmp_path: Path, framing: str, path: str) -> None:
    """Three bytes of a body and then nobody: no upload, no file, no reserved room, no version."""
    async with running(tmp_path) as admin, served(admin) as port:
        transaction = await admin.open()
        target = path.format(t=transaction)
        method = "PUT" if "experts" in target else "POST"
        piece = b"abc" if "Length" in framing else b"3\r\nabc\r\n"
        _, writer = await send(port, head(method, target, OCTET_LINE, framing) + piece)
        await until(lambda: admin.service.staging.budget.used)
        writer.close()
        await until(lambda: not admin.service.staging.budget.used)
        assert admin.files == []
        assert (await admin.http.get(transaction)).json()["uploads"] == []
        assert await admin.version() == "0"
        assert (await admin.upload(transaction)).status_code == 200


async def test_gone_within_a_commit(tmp_path: Path) -> None:
    """The commit runs to its end; its receipt is under the transaction and under the idempotency key."""
    async with running(tmp_path) as admin, served(admin) as port:
        transaction = await admin.open()
        await admin.upload(transaction)
        hold = admin.engine.faults.hold = asyncio.Event()
        _, writer = await send(port, head("POST", f"{transaction}/commit", "Idempotency-Key: k"))
        await until(lambda: "commit" in admin.engine.calls)
        writer.close()
        await asyncio.sleep(0.05)
        assert (await admin.http.get(transaction)).json()["state"] == "committing"
        hold.set()
        await admin.service.tasks.drain()
        view = (await admin.http.get(transaction)).json()
        assert (view["state"], view["receipt"]["version"]) == ("committed", "1")
        again = await admin.http.post(f"{transaction}/commit", headers={"idempotency-key": "k"})
        assert again.json() == view["receipt"]


async def test_a_cancelled_request_does_not_cancel_its_commit(tmp_path: Path) -> None:
    """Whatever cancels a handler, the work goes on and the lock is given back."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        await admin.upload(transaction)
        hold = admin.engine.faults.hold = asyncio.Event()
        task = asyncio.create_task(admin.http.post(f"{transaction}/commit"))
        await until(lambda: "commit" in admin.engine.calls)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert admin.service.changes.busy
        hold.set()
        await until(lambda: not admin.service.changes.busy)
        assert await admin.version() == "1"
        assert (await admin.commit()).json()["version"] == "2"


async def test_the_end_of_the_service_waits_for_a_commit(tmp_path: Path) -> None:
    """Shutting down lets a running commit finish."""
    engine = FakeEngine()
    engine.faults.hold = asyncio.Event()
    async with running(tmp_path, engine=engine) as admin:
        transaction = await admin.open()
        await admin.upload(transaction)
        task = asyncio.create_task(admin.http.post(f"{transaction}/commit"))
        await until(lambda: "commit" in engine.calls)
        asyncio.get_running_loop().call_later(0.05, engine.faults.hold.set)
        assert engine.ranks[0].version == 0
    assert engine.ranks[0].version == 1
    await task


async def test_refusals_come_before_100_continue(tmp_path: Path) -> None:
    """Auth, ids, state, size, type and busy are refused unread: no 100, and the connection ends."""
    async with running(tmp_path, token="t", body_bytes=10_000) as admin, served(admin) as port:
        admin.http.headers["authorization"] = "Bearer t"
        auth = "Authorization: Bearer t"
        ended = await admin.open()
        await admin.http.delete(ended)
        opened = await admin.open()
        size, big = "Content-Length: 500", "Content-Length: 20000"
        cases = {
            "unauthorized": (f"{opened}/patches", "POST", (OCTET_LINE, size)),
            "unknown_transaction": ("/v1/transactions/x/patches", "POST", (OCTET_LINE, size, auth)),
            "transaction_state": (f"{ended}/patches", "POST", (OCTET_LINE, size, auth)),
            "body_too_large": (f"{opened}/patches", "POST", (OCTET_LINE, big, auth)),
            "content_type": (f"{opened}/patches", "POST", (size, auth)),
            "unknown_expert": (f"{opened}/experts/0/99", "PUT", (OCTET_LINE, size, auth)),
            "version_moved": ("/v1/patches?base_version=4", "POST", (OCTET_LINE, size, auth)),
            "precondition_failed": ("/v1/patches", "POST", (OCTET_LINE, size, auth, 'If-Match: "4"')),
        }
        for expected, (path, method, lines) in cases.items():
            reader, writer = await send(port, head(method, path, *lines, "Expect: 100-continue"))
            answer = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            assert answer.startswith(b"HTTP/1.1 4"), (expected, answer)
            assert b"connection: close" in answer.lower()
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == expected


async def test_continue_is_sent_when_the_body_is_wanted(tmp_path: Path) -> None:
    """A client that asks first is told to go on, and its upload is taken."""
    async with running(tmp_path) as admin, served(admin) as port:
        content = expert_body()
        lines = (OCTET_LINE, f"Content-Length: {len(content)}", "Expect: 100-continue", "Connection: close")
        path = f"{await admin.open()}/experts/0/0"
        reader, writer = await send(port, head("PUT", path, *lines))
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 100")
        writer.write(content)
        assert b"HTTP/1.1 200" in await asyncio.wait_for(reader.read(), 5)
        writer.close()


async def test_slow_uploads_hold_no_lock(tmp_path: Path) -> None:
    """While clients dribble into their uploads, a commit goes through; they are timed out in the end."""
    async with running(tmp_path, body_idle_s=0.5) as admin, served(admin) as port:
        transaction = await admin.open()
        lines = (OCTET_LINE, "Content-Length: 1000")
        slow = [await send(port, head("POST", f"{transaction}/patches", *lines) + b"x") for _ in range(4)]
        slow += [await send(port, head("POST", "/v1/patches", *lines) + b"x") for _ in range(4)]
        await until(lambda: admin.service.staging.budget.used >= 8)
        assert (await admin.commit()).json()["version"] == "1"
        for reader, writer in slow:
            assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 408")
            writer.close()
        await until(lambda: not admin.files)


async def test_a_transaction_that_ends_while_a_body_arrives(tmp_path: Path) -> None:
    """What arrives for a transaction that has been aborted meanwhile is refused, and its file is gone."""
    async with running(tmp_path) as admin, served(admin) as port:
        transaction = await admin.open()
        content = expert_body()
        lines = (OCTET_LINE, f"Content-Length: {len(content)}")
        reader, writer = await send(port, head("PUT", f"{transaction}/experts/0/0", *lines) + content[:50])
        await until(lambda: admin.service.staging.budget.used)
        assert (await admin.http.delete(transaction)).status_code == 200
        writer.write(content[50:])
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 409")
        writer.close()
        await until(lambda: not admin.files and not admin.service.staging.budget.used)


async def test_slow_json_is_timed_out(tmp_path: Path) -> None:
    """A JSON body that does not come is 408."""
    async with running(tmp_path, json_s=0.1) as admin, served(admin) as port:
        lines = ("Content-Type: application/json", "Content-Length: 10")
        reader, writer = await send(port, head("POST", "/v1/transactions", *lines) + b"{")
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 408")
        writer.close()


async def test_an_engine_behind_a_real_socket_that_is_not_there(tmp_path: Path) -> None:
    """With nobody at the engine's address the service lives and says what is missing."""
    app = create_app(Settings(state_dir=tmp_path, engine_url="http://127.0.0.1:9"))
    async with asleep(tmp_path, Line(FakeEngine())) as admin:
        assert admin.app is not app
    async with app.router.lifespan_context(app):
        await until(lambda: "accept connections" in (app.state.service.link.problem or ""))
