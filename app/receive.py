"""Receives an upload's body: from the socket to a staged file, in flat memory, refused early."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import ClientDisconnect, Request

from app.announced import Announced, body_empty, body_too_large, check_announced
from app.budget import Room, StagedBudget
from app.sink import Batches, Sink
from loaders.header import Header, HeaderFeed, HeaderLimits, check_file_length
from loaders.staged import StagedFile
from schemas.problems import Code, ProblemError


@dataclass(frozen=True)
class ReceiveLimits:
    """Bounds on one body: bytes, seconds of silence, seconds in all, and its header."""

    body_nbytes: int = 16 << 30
    idle_s: float = 30.0
    total_s: float = 3600.0
    header: HeaderLimits = field(default_factory=HeaderLimits)


Report = Callable[[int], None]


def unheard(received: int) -> None:
    """There is nobody to tell."""


async def receive_body(
    request: Request,
    dest_dir: Path,
    limits: ReceiveLimits,
    budget: StagedBudget,
    report: Report = unheard,
) -> StagedFile:
    """Stream the body into a new file in `dest_dir`, checked up to its header and hashed.

    The caller owns the file; its bytes stay reserved in `budget` until the caller releases them. On every
    failure the file is gone and the reservation with it. Raises what `check_announced` and `parse_header`
    raise, `body_length`, `body_digest`, `body_timeout`, `client_gone`, `staged_budget`, `disk_full`.
    `report` is told how many bytes have come so far.
    """
    announced = check_announced(request.headers, limits.body_nbytes)
    room = Room(budget)
    room.grow(announced.nbytes or 0)
    try:
        sink = Sink(dest_dir, announced.digests)
        try:
            await asyncio.to_thread(sink.open)
            async with aclosing(_chunks(request, limits)) as chunks:
                header = await _stream(chunks, sink, announced, limits, room, report)
            blake3, digests = await asyncio.to_thread(sink.close)
            _check_digests(announced.digests, digests)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(sink.discard))
            raise
    except BaseException:
        room.free()
        raise
    return StagedFile(sink.path, header.nbytes, blake3, header)


async def _stream(
    chunks: AsyncIterator[bytes],
    sink: Sink,
    announced: Announced,
    limits: ReceiveLimits,
    room: Room,
    report: Report,
) -> Header:
    """Write all chunks; the header, once they turn out to be exactly the file that it implies."""
    feed = HeaderFeed(limits.header, announced.nbytes)
    batches = Batches(sink)
    header: Header | None = None
    received = 0
    async for chunk in chunks:
        received += len(chunk)
        # The header first: the refusal depends on the bytes, not on how many of them come at once.
        if header is None and _complete(feed, chunk, limits):
            header = await asyncio.to_thread(feed.header)
            _check_implied(header, announced, limits)
            room.grow(header.nbytes)
        if header is None:
            room.grow(received)
        elif received > header.nbytes:
            check_file_length(header.nbytes, received)
        await batches.put(chunk)
        report(received)
    _check_received(announced, received)
    if header is None:
        raise feed.ended()
    check_file_length(header.nbytes, received)
    await batches.finish()
    return header


async def _chunks(request: Request, limits: ReceiveLimits) -> AsyncGenerator[bytes, None]:
    """The body as it comes, within the deadlines; time spent on writing it counts for the total only."""
    clock = asyncio.get_running_loop().time
    end = clock() + limits.total_s
    stream = aiter(request.stream())
    while True:
        left = end - clock()
        if left <= 0:
            raise _timeout(limits, idle=False)
        try:
            async with asyncio.timeout(min(left, limits.idle_s)):
                chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise _timeout(limits, idle=left > limits.idle_s) from None
        except ClientDisconnect:
            raise ProblemError(
                Code.CLIENT_GONE, "The client closed the connection within the body."
            ) from None
        if chunk:
            yield chunk


def _timeout(limits: ReceiveLimits, idle: bool) -> ProblemError:
    if idle:
        return ProblemError(Code.BODY_TIMEOUT, f"No byte of the body arrived for {limits.idle_s:g} s.")
    return ProblemError(Code.BODY_TIMEOUT, f"The body was not complete after {limits.total_s:g} s.")


def _complete(feed: HeaderFeed, chunk: bytes, limits: ReceiveLimits) -> bool:
    """Take the next bytes of the header, unless it alone is too large; whether they are the last."""
    complete = feed.feed(chunk)
    if feed.least > limits.body_nbytes:
        raise body_too_large(limits.body_nbytes, feed.least)
    return complete


def _check_implied(header: Header, announced: Announced, limits: ReceiveLimits) -> None:
    """Refuse on the size that the header implies, before the data comes."""
    if announced.nbytes is not None:
        check_file_length(header.nbytes, announced.nbytes)
    if header.nbytes > limits.body_nbytes:
        raise body_too_large(limits.body_nbytes, header.nbytes)


def _check_received(announced: Announced, received: int) -> None:
    if received == 0:
        raise body_empty()
    if announced.nbytes is not None and received != announced.nbytes:
        raise ProblemError(
            Code.BODY_LENGTH,
            f"Content-Length says {announced.nbytes} bytes, but {received} arrived.",
            expected=announced.nbytes,
            received=received,
        )


def _check_digests(expected: Mapping[str, bytes], found: Mapping[str, bytes]) -> None:
    if any(found[name] != digest for name, digest in expected.items()):
        raise ProblemError(
            Code.BODY_DIGEST, "The body that arrived does not have the announced Content-Digest."
        )
