"""Bounds on request heads: whoever can reach the port must not fill the admin's memory with headers."""

from typing import Any

from app.reads import LargeReads
from schemas.problems import Code, ProblemError

HEAD_NBYTES = 64 * 1024
"""Largest request line with headers, about: what arrives with the last of it is not counted."""


class BoundedHeads(LargeReads):
    """uvicorn's HTTP protocol, which by itself accepts heads of any size."""

    _head_nbytes = 0
    _in_head = True
    _ended = False
    """Whether a request has ended within the data at hand, so that not all of it is a head's."""

    def on_message_begin(self) -> None:
        """A request begins."""
        self._head_nbytes, self._in_head = 0, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """What follows is the body, which the routes bound themselves."""
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next head may follow on the same connection."""
        super().on_message_complete()
        self._head_nbytes, self._in_head, self._ended = 0, True, True

    def data_received(self, data: bytes) -> None:
        """Feed the parser; end the connection if the head does not come to its end."""
        waiting, self._ended = self._in_head, False
        super().data_received(data)
        if not waiting or self._ended or not self._in_head or self.transport.is_closing():
            return
        self._head_nbytes += len(data)
        if self._head_nbytes > HEAD_NBYTES:
            self._refuse(ProblemError(Code.HEAD_TOO_LARGE, f"More than {HEAD_NBYTES} bytes of headers."))

    def _refuse(self, error: ProblemError) -> None:
        problem = error.problem()
        body = problem.model_dump_json().encode()
        lines: list[tuple[str, Any]] = [
            ("content-type", "application/problem+json"),
            ("content-length", len(body)),
            ("connection", "close"),
        ]
        head = "".join(f"{name}: {value}\r\n" for name, value in lines)
        start = f"HTTP/1.1 {problem.status} Request Header Fields Too Large\r\n"
        self.transport.write(f"{start}{head}\r\n".encode() + body)
        self.transport.close()
