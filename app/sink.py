"""Where a body goes: a new file, hashed while it is written, a batch at a time in a worker thread."""

import asyncio
import hashlib
import os
import secrets
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from blake3 import blake3

from app.writeback import Writeback
from loaders.staged import refuse_full_disk

BATCH_NBYTES = 1 << 20
"""Bytes that are handed to a thread at once; two batches exist at a time."""

WRITEBACK_NBYTES = 16 << 20
"""Bytes after which the disk is told to begin; what is smaller comes and goes without it."""


class Sink:
    """A file under a random name. Every method blocks; they may be called from any thread.

    A full disk raises `disk_full`, another fault `OSError`.
    """

    def __init__(self, folder: Path, algorithms: Iterable[str]) -> None:
        """A file in `folder`; `algorithms` are hashlib names beside BLAKE3. Touches no disk."""
        self.path = folder / f"{secrets.token_hex(16)}.safetensors"
        self._descriptor: int | None = None
        self._discarded = False
        self._lock = threading.Lock()
        self._blake3 = blake3()
        self._written = 0
        self._writeback = Writeback(WRITEBACK_NBYTES)
        self._hashes = {name: hashlib.new(name) for name in algorithms}

    def open(self) -> None:
        """Create the file, and its folder if need be."""
        with self._lock:
            if not self._discarded:
                self._descriptor = _create(self.path)

    def write(self, chunks: Sequence[bytes]) -> None:
        """Append `chunks`."""
        batch = b"".join(chunks)
        with self._lock:
            if self._descriptor is None:
                return  # discarded meanwhile
            self._blake3.update(batch)
            for digest in self._hashes.values():
                digest.update(batch)
            _append(self._descriptor, batch)
            self._written += len(batch)
            self._writeback.wrote(self._descriptor, self._written)

    def close(self) -> tuple[str, dict[str, bytes]]:
        """Close the file; its BLAKE3 in hex, and the digests that were asked for."""
        with self._lock:
            self._close()
        return self._blake3.hexdigest(), {name: digest.digest() for name, digest in self._hashes.items()}

    def discard(self) -> None:
        """Close and remove the file, after a write that is under way; fine at any time."""
        with self._lock:
            self._discarded = True
            self.path.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with refuse_full_disk():
                os.close(descriptor)


class Batches:
    """Feeds a sink from the event loop: one thread hop per batch, the next one collected meanwhile.

    `put` waits while two batches are on their way, so a slow disk slows the sender down.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._pending: list[bytes] = []
        self._pending_nbytes = 0
        self._writing: asyncio.Future[None] | None = None

    async def put(self, chunk: bytes) -> None:
        """Take the next bytes. Raises what an earlier write raised."""
        self._pending.append(chunk)
        self._pending_nbytes += len(chunk)
        if self._pending_nbytes >= BATCH_NBYTES:
            await self._hand_over()

    async def finish(self) -> None:
        """Return once everything is written. Raises what a write raised."""
        await self._hand_over()
        await self._written()

    async def _hand_over(self) -> None:
        await self._written()
        chunks, self._pending, self._pending_nbytes = self._pending, [], 0
        loop = asyncio.get_running_loop()
        self._writing = loop.run_in_executor(None, self._sink.write, chunks)
        self._writing.add_done_callback(_seen)

    async def _written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing


def _create(path: Path) -> int:
    with refuse_full_disk():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _append(descriptor: int, batch: bytes) -> None:
    """Write all of `batch`; the kernel may take less at a time."""
    rest = memoryview(batch)
    with refuse_full_disk():
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def _seen(writing: asyncio.Future[None]) -> None:
    """Look at a write's fault, so that it is not reported as lost when another one came first."""
    if not writing.cancelled():
        writing.exception()
