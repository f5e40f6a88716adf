"""What is made of the arrival times of tokens, and the streams that they come from. Nothing is timed here."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.streams import Course, Gap, Streams

COURSE = Course((((0.0, 1), (1.0, 2), (2.0, 3), (5.0, 4), (6.0, 5)), ((0.5, 1), (1.5, 3), (2.5, 4))))


@pytest.mark.parametrize(("begun", "ended", "longest"), [(3.0, 4.0, 3.0), (1.9, 2.1, 3.0), (0.1, 0.2, 1.0)])
def test_the_longest_gap_is_one_that_the_span_meets(begun: float, ended: float, longest: float) -> None:
    """A gap counts if any part of it lies in the span, also where the span is shorter than it."""
    assert COURSE.longest(begun, ended) == longest


def test_a_stall_is_what_a_gap_is_longer_than_usual() -> None:
    """The usual gap is the median over all streams."""
    assert COURSE.usual() == 1.0
    assert Gap(longest=3.0, usual=1.0, seconds=0.1).stall == 2.0


def test_tokens_are_counted_and_not_chunks() -> None:
    """A chunk may bring several tokens; those of all streams are added up."""
    assert COURSE.rate(0.0, 2.0) == (2 - 1 + 3 - 1) / 2.0


class _Endless(BaseHTTPRequestHandler):
    """Answers as a completion that goes on until its client leaves."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        tokens = 0
        try:
            while True:
                tokens += 1
                chunk = {"choices": [{"text": "x"}], "usage": {"completion_tokens": tokens}}
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                threading.Event().wait(0.001)
        except OSError:
            self.server.left.release()  # type: ignore[attr-defined]

    def log_message(self, *arguments: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Endless)
    server.left = threading.Semaphore(0)  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_streams_run_around_an_event_and_end(server: ThreadingHTTPServer) -> None:
    """Each has tokens before, during and after it, one after the other; then no client is left."""
    happened = threading.Event()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    with Streams(address, "m", [1], count=2) as streams:
        begun, ended, course = streams.during(lambda: happened.wait(0.1), quiet=5)
        assert len(course.streams) == 2
        for stream in course.streams:
            assert [tokens for _, tokens in stream] == list(range(1, len(stream) + 1))
            assert stream[4][0] < begun < ended < stream[-1][0]
        for _ in course.streams:
            assert server.left.acquire(timeout=30)  # type: ignore[attr-defined]
        again = streams.around(lambda: None, quiet=3)
        assert again.longest >= 0
