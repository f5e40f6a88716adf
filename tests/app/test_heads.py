"""Request heads are bounded: headers without end are refused, whoever sends them."""

import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from app.heads import HEAD_NBYTES, BoundedHeads


async def _length(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())))


@pytest.fixture
def port() -> Iterator[int]:
    """A tiny app behind the bounded protocol."""
    app = Starlette(routes=[Route("/", _length, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedHeads, log_level="warning"))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join()


def _answer(connection: socket.socket) -> bytes:
    found = b""
    while piece := connection.recv(65536):
        found += piece
    return found


@pytest.mark.parametrize("kind", ["one header", "many headers", "path"])
def test_an_endless_head_is_refused(port: int, kind: str) -> None:
    """A head that goes on past the bound gets a problem document and the end of the connection."""
    pieces = {
        "one header": (b"POST / HTTP/1.1\r\nhost: x\r\na: ", b"b" * 8192),
        "many headers": (b"POST / HTTP/1.1\r\nhost: x\r\n", b"a: b\r\n" * 1024),
        "path": (b"POST /", b"b" * 8192),
    }
    first, more = pieces[kind]
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(first)
        sent = 0
        try:
            while sent < 64 * HEAD_NBYTES:
                connection.sendall(more)
                sent += len(more)
        except OSError:
            pass
        assert sent < 64 * HEAD_NBYTES, "the whole head was taken"


def test_the_refusal_is_a_problem_document(port: int) -> None:
    """A client that stops just past the bound can read why it was refused."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\na: " + b"b" * (HEAD_NBYTES + 1024))
        connection.shutdown(socket.SHUT_WR)
        answer = _answer(connection)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"application/problem+json" in answer and b'"head_too_large"' in answer


def test_large_bodies_and_second_requests_pass(port: int) -> None:
    """Bodies are not counted, nor is one request's head towards the next one's on the same connection."""
    body = b"x" * (4 * HEAD_NBYTES)
    head = f"POST / HTTP/1.1\r\nhost: x\r\npad: {'p' * 40000}\r\ncontent-length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(f"{head}\r\n".encode() + body)
        connection.sendall(f"{head}connection: close\r\n\r\n".encode() + body)
        answer = _answer(connection)
    assert answer.count(b"HTTP/1.1 200 ") == 2 and answer.count(str(len(body)).encode()) == 2
