"""Receiving bodies through a real socket: types, lengths, deadlines, lost clients, full disks, budgets."""

import asyncio
import base64
import errno
import hashlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
import uvicorn
from blake3 import blake3
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message

import app.unread
from app.announced import check_announced
from app.budget import StagedBudget
from app.receive import ReceiveLimits, receive_body
from app.sink import BATCH_NBYTES, Batches, Sink
from loaders.header import HeaderLimits
from schemas.problems import Code, ProblemError
from tests.app.receiver import Receiver
from tests.loaders.attacks import ATTACKS, Attack
from tests.loaders.bodies import body, f32

LIMIT = 100_000
GOOD = body({"w": f32(*range(100)), "b": f32(1, 2)}, {"format": "pt"})
TYPE = "Content-Type: application/octet-stream"
CHUNKED = "Transfer-Encoding: chunked"


@dataclass
class Server:
    """A receiver and where it listens."""

    receiver: Receiver
    port: int

    def connect(self) -> socket.socket:
        """A new connection."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def ask(self, content: bytes, *headers: str) -> "Answer":
        """Send one request with these headers and all of `content`, as it is."""
        with self.connect() as connection:
            connection.sendall(head(*headers) + content)
            return read_answer(connection)

    def post(self, content: bytes, *headers: str) -> "Answer":
        """Send a body with its length."""
        return self.ask(content, TYPE, f"Content-Length: {len(content)}", *headers)

    def files(self) -> list[Path]:
        """What lies in the folder."""
        return list(self.receiver.folder.glob("*")) if self.receiver.folder.exists() else []

    def wait_for(self, outcome: Code | str) -> None:
        """Return once the last request has had that outcome."""
        for _ in range(500):
            if self.receiver.outcomes[-1:] == [str(outcome)]:
                return
            time.sleep(0.01)
        raise AssertionError(f"expected {outcome}, had {self.receiver.outcomes}")

    def assert_nothing_left(self) -> None:
        """No file, no reservation."""
        assert self.files() == []
        assert self.receiver.budget.used == 0


@dataclass
class Answer:
    """A response as it came over the socket."""

    status: int
    headers: dict[str, str]
    document: dict[str, Any]
    interim: bool
    """Whether `100 Continue` came before it."""

    @property
    def code(self) -> str:
        """The problem's code."""
        return str(self.document["code"])


def head(*headers: str) -> bytes:
    """Request line and headers."""
    return "\r\n".join(["POST /upload HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]).encode()


def chunk(content: bytes) -> bytes:
    """One chunk of a chunked body; an empty one ends it."""
    return b"%x\r\n%s\r\n" % (len(content), content)


def read_answer(connection: socket.socket) -> Answer:
    """Read one response by its Content-Length."""
    stream = connection.makefile("rb")
    status, headers = _read_head(stream.readline)
    interim = status == 100
    if interim:
        status, headers = _read_head(stream.readline)
    return Answer(status, headers, json.loads(stream.read(int(headers["content-length"]))), interim)


def _read_head(readline: Callable[[], bytes]) -> tuple[int, dict[str, str]]:
    status = int(readline().split()[1])
    lines = iter(lambda: readline().strip().decode(), "")
    return status, {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def is_closed(connection: socket.socket) -> bool:
    """Whether the server ends the connection; waits for it, shorter than keep-alive lasts."""
    connection.settimeout(3)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@pytest.fixture(scope="module", params=["httptools", "h11"])
def running(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The tiny app under uvicorn, with each of its two parsers."""
    receiver = Receiver(Path(), ReceiveLimits(), StagedBudget(0))
    http: Literal["httptools", "h11"] = request.param
    config = uvicorn.Config(receiver.app, port=0, http=http, log_level="warning", timeout_keep_alive=30)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield Server(receiver, server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def server(running: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The running app with a folder, limits and a budget of the test's own, and a short linger."""
    receiver = running.receiver
    receiver.folder = tmp_path / "staged"
    receiver.limits = ReceiveLimits(body_nbytes=LIMIT, idle_s=5, total_s=10)
    receiver.budget = StagedBudget(3 * LIMIT)
    receiver.outcomes.clear()
    monkeypatch.setattr(app.unread, "LINGER_S", 0.3)
    return running


# what arrives


@pytest.mark.parametrize("chunked", [False, True])
def test_file_arrives(server: Server, chunked: bool) -> None:
    """The file on disk is the body, for its owner alone; its BLAKE3 is told; its bytes stay reserved."""
    if chunked:
        answer = server.ask(chunk(GOOD[:100]) + chunk(GOOD[100:]) + chunk(b""), TYPE, CHUNKED)
    else:
        answer = server.post(GOOD)
    assert answer.status == 201
    [path] = server.files()
    assert answer.document == {
        "path": str(path),
        "nbytes": len(GOOD),
        "blake3": blake3(GOOD).hexdigest(),
    }
    assert path.read_bytes() == GOOD
    assert path.stat().st_mode & 0o777 == 0o600
    assert server.receiver.budget.used == len(GOOD)


def test_byte_by_byte(server: Server) -> None:
    """A body in the smallest pieces is the same body."""
    with server.connect() as connection:
        connection.sendall(head(TYPE, f"Content-Length: {len(GOOD)}"))
        for at in range(len(GOOD)):
            connection.sendall(GOOD[at : at + 1])
        answer = read_answer(connection)
    assert answer.document["blake3"] == blake3(GOOD).hexdigest()


def test_many_batches(server: Server) -> None:
    """A body of several batches is written and hashed in order."""
    server.receiver.limits = replace(server.receiver.limits, body_nbytes=1 << 30)
    server.receiver.budget.limit = 1 << 30
    content = body({"w": ("U8", (5 * BATCH_NBYTES + 7,), os.urandom(5 * BATCH_NBYTES + 7))})
    answer = server.post(content)
    assert answer.document["blake3"] == blake3(content).hexdigest()
    assert Path(answer.document["path"]).read_bytes() == content


def test_connection_is_kept(server: Server) -> None:
    """After an accepted body the connection serves the next request."""
    with server.connect() as connection:
        for _ in range(2):
            connection.sendall(head(TYPE, f"Content-Length: {len(GOOD)}") + GOOD)
            answer = read_answer(connection)
            assert (answer.status, answer.headers.get("connection")) == (201, None)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.id)
def test_attack(server: Server, attack: Attack) -> None:
    """Every malformed file is refused over HTTP too, and nothing is left of it."""
    if len(attack.body) > LIMIT:
        server.receiver.limits = replace(server.receiver.limits, body_nbytes=10 * LIMIT)
        server.receiver.budget.limit = 10 * LIMIT
    answer = server.post(attack.body)
    expected = {"empty": Code.BODY_EMPTY, "terabytes announced": Code.HEADER_OFFSETS}
    assert answer.code == expected.get(attack.id, attack.code)
    server.assert_nothing_left()


WRONG = {attack.id: attack.body for attack in ATTACKS} | {
    "wrong from the start and too large": bytes(3 * LIMIT),
    "a header without end": (2 * LIMIT).to_bytes(8, "little") + b" " * 3 * LIMIT,
    "a bad header and too large": b"\x02" + bytes(7) + b"[]" + bytes(3 * LIMIT),
    "good, but goes on beyond the limit": GOOD + bytes(2 * LIMIT),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_refusal_does_not_depend_on_the_pieces(tmp_path: Path, wrong: str) -> None:
    """However the network cuts a body, the same thing is found wrong with it."""
    content = WRONG[wrong]
    limits = ReceiveLimits(body_nbytes=LIMIT)

    async def refusal(size: int) -> Code:
        pieces = iter([content[at : at + size] for at in range(0, len(content), size)])

        async def receive() -> Message:
            piece = next(pieces, b"")
            return {"type": "http.request", "body": piece, "more_body": piece != b""}

        with pytest.raises(ProblemError) as refused:
            await receive_body(_request(receive), tmp_path, limits, StagedBudget(10 * LIMIT))
        return refused.value.code

    codes = {size: asyncio.run(refusal(size)) for size in (len(content) or 1, 50_000, 9, 8, 3)}
    assert len(set(codes.values())) == 1, codes


# what headers announce


@pytest.mark.parametrize(
    "given",
    [
        "application/octet-stream",
        "Application/Octet-Stream; x=y",
        "application/vnd.safetensors",
        " APPLICATION/VND.SAFETENSORS ;version=1",
    ],
)
def test_content_types(server: Server, given: str) -> None:
    """Both types are taken, in any case and with parameters."""
    answer = server.ask(GOOD, f"Content-Type: {given}", f"Content-Length: {len(GOOD)}")
    assert answer.status == 201


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("Content-Type:",),
        ("Content-Type: application/x-www-form-urlencoded",),
        ("Content-Type: multipart/form-data; boundary=x",),
        ("Content-Type: application/json",),
        ("Content-Type: application/octet-stream, text/plain",),
        ("Content-Type: application/octet-stream", "Content-Type: text/plain"),
        ("Content-Type: */*",),
    ],
)
def test_other_content_types(server: Server, headers: tuple[str, ...]) -> None:
    """What curl sends with -d, -F or -T is refused with a text that says what to do instead."""
    answer = server.ask(GOOD, *headers, f"Content-Length: {len(GOOD)}")
    assert (answer.status, answer.code) == (415, Code.CONTENT_TYPE)
    assert "--data-binary" in answer.document["detail"]
    assert "Content-Type: application/octet-stream" in answer.document["detail"]
    server.assert_nothing_left()


@pytest.mark.parametrize(
    "encoding", ["gzip", "zstd", "br", "deflate", "gzip, gzip", "identity, gzip", "x", "aws-chunked"]
)
def test_content_encodings(server: Server, encoding: str) -> None:
    """Compressed bodies are refused as such, not as bad headers."""
    answer = server.post(GOOD, f"Content-Encoding: {encoding}")
    assert (answer.status, answer.code) == (415, Code.CONTENT_ENCODING)
    server.assert_nothing_left()


def test_identity_encoding(server: Server) -> None:
    """`identity` is no encoding."""
    assert server.post(GOOD, "Content-Encoding: Identity").status == 201


def test_content_range(server: Server) -> None:
    """A part of a file is not taken for the file."""
    answer = server.post(GOOD, f"Content-Range: bytes 0-9/{len(GOOD)}")
    assert (answer.status, answer.code) == (400, Code.BAD_REQUEST)


@pytest.mark.parametrize("length", ["abc", "-1", "+5", "1.5", "0x10", "5, 5", "", " ", "\xb2", "9" * 30])
def test_malformed_content_length(length: str) -> None:
    """A length that is no number is refused, whatever server is in front."""
    headers = Headers({"content-type": "application/octet-stream", "content-length": length})
    with pytest.raises(ProblemError) as refusal:
        check_announced(headers, LIMIT)
    assert refusal.value.code is Code.BAD_REQUEST


@pytest.mark.parametrize("length", ["abc", "-1", "5, 6"])
def test_malformed_content_length_on_the_wire(server: Server, length: str) -> None:
    """The server itself answers such requests with 400 and nothing is received."""
    with server.connect() as connection:
        connection.sendall(head(TYPE, f"Content-Length: {length}"))
        assert connection.recv(100).split()[1] == b"400"
    server.assert_nothing_left()


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"", (TYPE, "Content-Length: 0")),
        (chunk(b""), (TYPE, CHUNKED)),
        (b"", (TYPE,)),
    ],
)
def test_empty_body(server: Server, content: bytes, headers: tuple[str, ...]) -> None:
    """No body is told apart from a bad one."""
    answer = server.ask(content, *headers)
    assert (answer.status, answer.code) == (400, Code.BODY_EMPTY)
    server.assert_nothing_left()


# lengths


def test_limit_is_exact(server: Server) -> None:
    """A body of the limit's size passes, announced or chunked; one byte more is 413 either way."""
    for surplus, status in ((0, 201), (1, 413)):
        size = LIMIT - len(body({"w": ("U8", (10_000,), b"")})) + surplus
        content = body({"w": ("U8", (size,), bytes(size))})
        size += LIMIT + surplus - len(content)
        content = body({"w": ("U8", (size,), bytes(size))})
        assert len(content) == LIMIT + surplus
        assert server.post(content).status == status
        pieces = [chunk(content[at : at + 1000]) for at in range(0, len(content), 1000)]
        assert server.ask(b"".join(pieces) + chunk(b""), TYPE, CHUNKED).status == status


def test_chunked_is_counted(server: Server) -> None:
    """A chunked body over the limit ends at the limit, though its header promises no end."""
    content = body({"w": ("U8", (LIMIT // 2,), bytes(LIMIT // 2))})
    server.receiver.limits = replace(server.receiver.limits, body_nbytes=LIMIT // 4)
    with server.connect() as connection:
        connection.sendall(head(TYPE, CHUNKED) + chunk(content[:1000]))
        answer = read_answer(connection)
    assert (answer.status, answer.code, answer.document["limit"]) == (413, Code.BODY_TOO_LARGE, LIMIT // 4)
    server.assert_nothing_left()


def test_header_over_the_limit(server: Server) -> None:
    """A header that ends beyond the body's limit is 413 as soon as its length has arrived."""
    server.receiver.limits = replace(server.receiver.limits, body_nbytes=50, idle_s=0.3)
    for size, code in ((7, Code.BODY_TIMEOUT), (8, Code.BODY_TOO_LARGE), (60, Code.BODY_TOO_LARGE)):
        content = ((4000).to_bytes(8, "little") + b"{" * 60)[:size]
        assert server.ask(chunk(content), TYPE, CHUNKED).code == code


@pytest.mark.parametrize("surplus", [-5, -1, 1, 1000])
def test_announced_length_against_header(server: Server, surplus: int) -> None:
    """A Content-Length that the header contradicts is refused before the data is sent."""
    with server.connect() as connection:
        connection.sendall(head(TYPE, f"Content-Length: {len(GOOD) + surplus}") + GOOD[:-408])
        answer = read_answer(connection)
        assert (answer.status, answer.code) == (422, Code.HEADER_OFFSETS)
        assert (answer.document["expected"], answer.document["received"]) == (len(GOOD), len(GOOD) + surplus)
        assert is_closed(connection)
    server.assert_nothing_left()


def test_chunked_too_long(server: Server) -> None:
    """A chunked body is refused with the first byte too many, though it has not ended."""
    with server.connect() as connection:
        connection.sendall(head(TYPE, CHUNKED) + chunk(GOOD) + chunk(b"x"))
        answer = read_answer(connection)
    assert (answer.code, answer.document["expected"]) == (Code.HEADER_OFFSETS, len(GOOD))
    assert answer.document["received"] > len(GOOD)
    server.assert_nothing_left()


@pytest.mark.parametrize("size", [3, 50, len(GOOD) - 1])
def test_chunked_too_short(server: Server, size: int) -> None:
    """A chunked body that ends early is refused with both counts."""
    answer = server.ask(chunk(GOOD[:size]) + chunk(b""), TYPE, CHUNKED)
    assert answer.status == 422
    assert answer.document["received"] == size
    server.assert_nothing_left()


def test_bad_header_is_refused_at_once(server: Server) -> None:
    """Eight bytes are enough to refuse a body that promises many more."""
    with server.connect() as connection:
        connection.sendall(head(TYPE, f"Content-Length: {LIMIT}") + b"\xff" * 8)
        answer = read_answer(connection)
        assert (answer.status, answer.code) == (422, Code.HEADER_LENGTH)
        assert is_closed(connection)
    server.assert_nothing_left()


# before the body


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((TYPE, f"Content-Length: {LIMIT + 1}"), 413),
        (("Content-Type: text/plain", "Content-Length: 10"), 415),
        ((TYPE, "Content-Length: 10", "Content-Encoding: gzip"), 415),
        ((TYPE, f"Content-Length: {LIMIT}"), 507),
    ],
)
def test_refused_before_continue(
    server: Server, monkeypatch: pytest.MonkeyPatch, headers: tuple[str, ...], status: int
) -> None:
    """A client that asks first is refused without `100 Continue`, and the connection is closed at once."""
    monkeypatch.setattr(app.unread, "LINGER_S", 60)
    if status == 507:
        server.receiver.budget.limit = LIMIT - 1
    with server.connect() as connection:
        connection.sendall(head(*headers, "Expect: 100-continue"))
        answer = read_answer(connection)
        assert (answer.status, answer.interim, answer.headers["connection"]) == (status, False, "close")
        assert is_closed(connection)
    server.assert_nothing_left()


def test_continue(server: Server) -> None:
    """A client that asks first and may send is told so."""
    with server.connect() as connection:
        connection.sendall(head(TYPE, f"Content-Length: {len(GOOD)}", "Expect: 100-continue"))
        stream = connection.makefile("rb")
        assert stream.readline().split()[1] == b"100"
        stream.readline()
        connection.sendall(GOOD)
        assert stream.readline().split()[1] == b"201"


def test_refusal_reaches_a_client_that_still_sends(server: Server) -> None:
    """A client that sends megabytes without looking up gets its answer, not a reset connection."""
    answer = httpx.post(
        f"http://127.0.0.1:{server.port}/upload",
        content=(bytes(50_000) for _ in range(100)),
        headers={"Content-Type": "application/octet-stream"},
    )
    assert answer.json()["code"] == Code.HEADER_LENGTH
    assert answer.headers["connection"] == "close"


def test_refused_client_can_finish_sending(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a refusal the rest of the body is taken for a while, then the connection is closed."""
    monkeypatch.setattr(app.unread, "LINGER_S", 60)
    with server.connect() as connection:
        connection.sendall(head(TYPE, f"Content-Length: {LIMIT}") + b"\xff" * 8)
        assert read_answer(connection).status == 422
        for _ in range(9):
            connection.sendall(bytes((LIMIT - 8) // 9))
            time.sleep(0.01)
        connection.sendall(bytes((LIMIT - 8) % 9))
        assert is_closed(connection)


# deadlines and clients that go away


def test_idle_client(server: Server) -> None:
    """Silence within a body is ended with 408 and the connection closed; nothing is left."""
    server.receiver.limits = replace(server.receiver.limits, idle_s=0.2)
    with server.connect() as connection:
        connection.sendall(head(TYPE, f"Content-Length: {len(GOOD)}") + GOOD[:20])
        answer = read_answer(connection)
        assert (answer.status, answer.code, answer.headers["connection"]) == (408, Code.BODY_TIMEOUT, "close")
        assert "No byte" in answer.document["detail"]
        assert is_closed(connection)
    server.assert_nothing_left()


def test_client_that_sends_nothing(server: Server) -> None:
    """A body of which not one byte comes is ended too."""
    server.receiver.limits = replace(server.receiver.limits, idle_s=0.2)
    assert server.ask(b"", TYPE, "Content-Length: 1000").code == Code.BODY_TIMEOUT
    server.assert_nothing_left()


def test_dripping_client(server: Server) -> None:
    """One byte now and then does not get around the total deadline."""
    server.receiver.limits = replace(server.receiver.limits, idle_s=5, total_s=0.5)
    with server.connect() as connection:
        connection.sendall(head(TYPE, f"Content-Length: {len(GOOD)}"))
        stop = threading.Event()

        def drip() -> None:
            for at in range(len(GOOD)):
                if stop.wait(0.05):
                    return
                connection.sendall(GOOD[at : at + 1])

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            answer = read_answer(connection)
        finally:
            stop.set()
            dripping.join()
    assert (answer.status, answer.code) == (408, Code.BODY_TIMEOUT)
    assert "not complete" in answer.document["detail"]
    server.assert_nothing_left()


def test_total_deadline_within_silence(server: Server) -> None:
    """The total deadline does not wait for the next byte."""
    server.receiver.limits = replace(server.receiver.limits, idle_s=60, total_s=0.2)
    answer = server.ask(GOOD[:20], TYPE, f"Content-Length: {len(GOOD)}")
    assert "not complete" in answer.document["detail"]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [0, 3, 200, len(GOOD) - 1])
def test_client_gone(server: Server, caplog: pytest.LogCaptureFixture, chunked: bool, size: int) -> None:
    """A client that closes within the body leaves no file, no reservation and no error in the log."""
    with caplog.at_level(logging.WARNING), server.connect() as connection:
        if chunked:
            connection.sendall(head(TYPE, CHUNKED) + (chunk(GOOD[:size]) if size else b""))
        else:
            connection.sendall(head(TYPE, f"Content-Length: {len(GOOD)}") + GOOD[:size])
        time.sleep(0.05)
        connection.close()
        server.wait_for(Code.CLIENT_GONE)
    server.assert_nothing_left()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_cancelled_request(tmp_path: Path) -> None:
    """Whenever the task that receives is cancelled, nothing is left."""

    async def cancelled_after(steps: int) -> None:
        budget = StagedBudget(LIMIT)
        messages = [GOOD[:50], GOOD[50:150]]

        async def receive() -> Message:
            if messages:
                return {"type": "http.request", "body": messages.pop(0), "more_body": True}
            await asyncio.sleep(60)
            raise AssertionError

        receiving = asyncio.ensure_future(receive_body(_request(receive), tmp_path, ReceiveLimits(), budget))
        for _ in range(steps):
            await asyncio.sleep(0)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert list(tmp_path.glob("*")) == []
        assert budget.used == 0

    for steps in range(1, 40):
        asyncio.run(cancelled_after(steps))


def test_sink_discarded_before_it_opens(tmp_path: Path) -> None:
    """A file that is no longer wanted when its thread gets to run is not made."""
    sink = Sink(tmp_path, ())
    sink.discard()
    sink.open()
    sink.write([b"x"])
    assert list(tmp_path.iterdir()) == []


def _request(receive: Callable[[], Any]) -> Request:
    headers = [(b"content-type", b"application/octet-stream")]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


# disks and budgets


def fail_writes(monkeypatch: pytest.MonkeyPatch, code: int, after: int = 0) -> None:
    """Let `os.write` in the sink fail with `code` from its call number `after` on; before it writes half."""
    true_write = os.write
    calls = iter(range(1_000_000))

    def write(descriptor: int, data: memoryview) -> int:
        if next(calls) >= after:
            raise OSError(code, os.strerror(code))
        return true_write(descriptor, data[: max(1, len(data) // 2)])

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("after", [0, 3])
def test_disk_full(server: Server, monkeypatch: pytest.MonkeyPatch, code: int, after: int) -> None:
    """A full disk is 507, at the first write or a later one, and the file is gone."""
    fail_writes(monkeypatch, code, after)
    answer = server.post(GOOD)
    assert (answer.status, answer.code) == (507, Code.DISK_FULL)
    server.assert_nothing_left()


def test_disk_full_at_open(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for the file's name is 507 too."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "mkdir", full)
    assert server.post(GOOD).code == Code.DISK_FULL
    monkeypatch.undo()
    server.assert_nothing_left()


def test_short_writes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes half of what it is given still gets all of it."""
    fail_writes(monkeypatch, errno.EIO, after=10_000)
    answer = server.post(GOOD)
    assert Path(answer.document["path"]).read_bytes() == GOOD


def test_broken_disk(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another fault of the disk is no refusal; still nothing is left."""
    fail_writes(monkeypatch, errno.EIO)
    with server.connect() as connection:
        connection.sendall(head(TYPE, f"Content-Length: {len(GOOD)}") + GOOD)
        assert connection.recv(100).split()[1] == b"500"
    server.assert_nothing_left()


def test_budget_over_several_uploads(server: Server) -> None:
    """Uploads share one budget: what does not fit is 507, and fits once room is given back."""
    server.receiver.budget.limit = 2 * len(GOOD)
    assert [server.post(GOOD).status for _ in range(3)] == [201, 201, 507]
    assert server.ask(chunk(GOOD) + chunk(b""), TYPE, CHUNKED).code == Code.STAGED_BUDGET
    assert server.receiver.budget.used == 2 * len(GOOD)
    server.receiver.budget.release(len(GOOD))
    assert server.ask(chunk(GOOD) + chunk(b""), TYPE, CHUNKED).status == 201


def test_announced_bytes_are_reserved(server: Server) -> None:
    """A body on its way holds all of its room; when its client goes away the room is free again."""
    server.receiver.budget.limit = 2 * len(GOOD) - 1
    with server.connect() as connection:
        connection.sendall(head(TYPE, f"Content-Length: {len(GOOD)}") + GOOD[:9])
        for _ in range(500):
            if server.receiver.budget.used:
                break
            time.sleep(0.01)
        assert server.post(GOOD).code == Code.STAGED_BUDGET
    server.wait_for(Code.CLIENT_GONE)
    assert server.post(GOOD).status == 201


def test_chunked_header_reserves_what_it_implies(server: Server) -> None:
    """Of a chunked body the room is taken as soon as its header tells the size."""
    server.receiver.budget.limit = len(GOOD) - 1
    with server.connect() as connection:
        connection.sendall(head(TYPE, CHUNKED) + chunk(GOOD[:-408]))
        assert read_answer(connection).code == Code.STAGED_BUDGET
    server.assert_nothing_left()


def test_budget_counts() -> None:
    """Room is taken exactly up to the limit, and no more is given back than was taken."""
    budget = StagedBudget(10)
    budget.reserve(10)
    with pytest.raises(ProblemError):
        budget.reserve(1)
    budget.release(10)
    with pytest.raises(ValueError, match="released"):
        budget.release(1)


# digests


def digest_of(content: bytes, algorithm: str = "sha256") -> str:
    """The digest as Content-Digest writes it."""
    return ":" + base64.b64encode(hashlib.new(algorithm, content).digest()).decode() + ":"


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (f"sha-256={digest_of(GOOD)}", 201),
        (f"sha-256={digest_of(GOOD + b'x')}", 400),
        (f"sha-512={digest_of(GOOD, 'sha512')}", 201),
        (f"sha-512={digest_of(b'', 'sha512')}", 400),
        (f"sha-256={digest_of(GOOD)}, sha-512={digest_of(b'', 'sha512')}", 400),
        ("md5=:CY9rzUYh03PK3k6DJie09g==:", 201),
        (f"sha-256={digest_of(GOOD)};a=1", 201),
    ],
)
def test_content_digest(server: Server, value: str, status: int) -> None:
    """A digest that was sent must be the body's; unknown algorithms are no promise."""
    answer = server.post(GOOD, f"Content-Digest: {value}")
    assert answer.status == status
    if status == 400:
        assert answer.code == Code.BODY_DIGEST
        server.assert_nothing_left()


@pytest.mark.parametrize(
    "value",
    [
        "",
        "x",
        "sha-256",
        "sha-256=abc",
        "sha-256=:abc:",
        "sha-256=:####:",
        "sha-256=:AAAA:",
        "sha-256=::",
        ":AAAA:",
    ],
)
def test_malformed_content_digest(server: Server, value: str) -> None:
    """A digest that cannot be read is refused, not ignored."""
    answer = server.post(GOOD, f"Content-Digest: {value}")
    assert (answer.status, answer.code) == (400, Code.BAD_REQUEST)
    server.assert_nothing_left()


# back-pressure


def test_at_most_two_batches_wait(tmp_path: Path) -> None:
    """While the disk is stuck, one batch is being written, one collected, and the sender waits."""
    stuck = threading.Event()

    class Stuck(Sink):
        def write(self, chunks: Any) -> None:
            stuck.wait()
            super().write(chunks)

    async def scenario() -> None:
        sink = Stuck(tmp_path, ())
        sink.open()
        batches = Batches(sink)
        taken = 0

        async def send() -> None:
            nonlocal taken
            for _ in range(5):
                await batches.put(bytes(BATCH_NBYTES))
                taken += 1

        sending = asyncio.ensure_future(send())
        await asyncio.sleep(0.1)
        assert taken == 1
        stuck.set()
        await sending
        await batches.finish()
        sink.close()
        assert sink.path.stat().st_size == 5 * BATCH_NBYTES

    asyncio.run(scenario())


def test_small_header_limit(server: Server) -> None:
    """The header's limit is the receiver's setting."""
    server.receiver.limits = replace(server.receiver.limits, header=HeaderLimits(nbytes=20))
    assert server.post(GOOD).code == Code.HEADER_LENGTH
