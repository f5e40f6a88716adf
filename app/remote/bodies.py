"""Bodies of uploads: sized beforehand, made piece by piece, and made again when a request is repeated."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from app.remote.tensors import CHUNK_NBYTES, Array, Tensor
from schemas.dtypes import Dtype

Watch = Callable[[int, int | None], None]
"""Told how many bytes have passed, and of how many if that is known; fewer than before: it began anew."""


class Part(Protocol):
    """One tensor of a body; its bytes are asked for when it is its turn."""

    @property
    def dtype(self) -> Dtype:
        """Type of the elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""

    def chunks(self) -> Iterator[bytes]:
        """The bytes in pieces."""


@dataclass(frozen=True)
class Body:
    """What an upload sends: `nbytes` bytes, from the start each time that `chunks` is called."""

    nbytes: int
    chunks: Callable[[], Iterator[bytes]]

    @staticmethod
    def of_file(path: Path) -> "Body":
        """A file as it is. Raises OSError."""
        nbytes = path.stat().st_size

        def chunks() -> Iterator[bytes]:
            left = nbytes
            with path.open("rb") as file:
                while chunk := file.read(min(CHUNK_NBYTES, left)):
                    yield chunk
                    left -= len(chunk)
            if left:
                raise OSError(f"{path} became shorter while it was sent")

        return Body(nbytes, chunks)

    @staticmethod
    def of_bytes(content: bytes) -> "Body":
        """Bytes as they are."""
        return Body(len(content), lambda: iter((content,)))

    @staticmethod
    def of_tensors(tensors: Mapping[str, Array]) -> "Body":
        """A plain safetensors file. Raises TypeError for what is no tensor."""
        return safetensors({name: Tensor.of(array) for name, array in tensors.items()})

    def watched(self, watch: Watch) -> "Body":
        """The same, with somebody who is told how far it is."""

        def chunks() -> Iterator[bytes]:
            sent = 0
            watch(sent, self.nbytes)
            for chunk in self.chunks():
                yield chunk
                sent += len(chunk)
                watch(sent, self.nbytes)

        return replace(self, chunks=chunks)


def safetensors(parts: Mapping[str, Part], metadata: Mapping[str, str] | None = None) -> Body:
    """A safetensors file of `parts`; the widest elements come first, so that all of them are aligned."""
    placed = dict(sorted(parts.items(), key=lambda item: -item[1].dtype.nbytes))
    head = header(placed, metadata)

    def chunks() -> Iterator[bytes]:
        yield head
        for part in placed.values():
            yield from part.chunks()

    return Body(len(head) + sum(part.nbytes for part in parts.values()), chunks)


def header(parts: Mapping[str, Part], metadata: Mapping[str, str] | None) -> bytes:
    """The first bytes of the file, up to its data, which begins at a multiple of 8."""
    found: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, part in parts.items():
        begin, end = end, end + part.nbytes
        found[name] = {"dtype": str(part.dtype), "shape": list(part.shape), "data_offsets": [begin, end]}
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


async def threaded(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The same pieces, each made in a thread: reading a disk or a GPU does not hold up the event loop."""
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        yield chunk
