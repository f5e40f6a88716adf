"""How the bytes of a body come from uvicorn: many at a time, put together once."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

READ_NBYTES = 1 << 20
"""Bytes of a connection that wait for their request before no more are read; uvicorn's own 64 KiB cost a
turn of the event loop for each."""


class LargeReads(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with larger pieces of bodies."""

    def on_body(self, body: bytes) -> None:
        """Keep the bytes until the request asks for some."""
        if self.parser.should_upgrade() or self.cycle.response_complete:
            super().on_body(body)
            return
        cycle = self.cycle
        if not isinstance(cycle.body, _Pieces):
            cycle.body = _Pieces(cycle.body)
        cycle.body.append(body)
        if len(cycle.body) >= READ_NBYTES:
            self.flow.pause_reading()
        cycle.message_event.set()


class _Pieces(bytearray):
    """In the place of the `bytearray` that uvicorn copies all into: here `bytes` does it, once."""

    def __init__(self, first: bytes | bytearray) -> None:
        super().__init__()
        self._pieces: list[bytes | bytearray] = [first] if first else []
        self._nbytes = len(first)

    def append(self, piece: bytes) -> None:  # type: ignore[override]
        self._pieces.append(piece)
        self._nbytes += len(piece)

    def __len__(self) -> int:
        return self._nbytes

    def __bytes__(self) -> bytes:
        return b"".join(self._pieces)
