"""Checks of values and indices in a file: bounded memory, read in pieces, never mapped.

Every function takes an open file descriptor and a byte span of little-endian elements.
At most 48 MiB are held, whatever the sizes. All block on the disk and on numpy.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.dtypes import Dtype

CHUNK_NBYTES = 1 << 18
"""Bytes read at a time: small enough to stay in the processor's cache."""
SHARE_NBYTES = 64 << 20
"""Bytes that are worth a thread of their own."""
SORT_NBYTES = 32 << 20
"""Lists of unsorted indices up to this size are sorted in memory."""
WINDOW = 1 << 28
"""Positions that one pass over unsorted indices can tell apart: a bitmap of 32 MiB."""

_THREADS = 4

_UINT: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
_INDEX: dict[Dtype, np.dtype[Any]] = {Dtype.I32: np.dtype("<i4"), Dtype.I64: np.dtype("<i8")}
_NONFINITE = {
    Dtype.F8_E4M3: 0x7F,  # no infinity; NaN has all bits but the sign
    Dtype.F8_E5M2: 0x7C,
    Dtype.F8_E8M0: 0xFF,
    Dtype.F16: 0x7C00,
    Dtype.BF16: 0x7F80,
    Dtype.F32: 0x7F800000,
    Dtype.F64: 0x7FF0000000000000,
}
"""Bits that are all set in NaN and infinity, and never in another number."""


class IndexFault(Exception):
    """Indices that name no element, or one twice; `position` is the place in the list."""

    def __init__(self, what: str, position: int | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.position = position


@dataclass(frozen=True)
class IndexScan:
    """What one pass over a list of indices shows; of an empty list, `low` is 0 and `high` -1."""

    count: int
    low: int
    high: int
    increasing: bool
    """Strictly: then none repeats."""


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to read `path` by."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def first_nonfinite(descriptor: int, offset: int, nbytes: int, dtype: Dtype) -> int | None:
    """Position of the first NaN or infinity among the elements of the span, or none.

    A long span is looked at by several threads; numpy and reading let each other run.
    """
    mask = _NONFINITE.get(dtype)
    if mask is None:
        return None
    word = _UINT[dtype.nbytes]
    begins = range(0, nbytes, SHARE_NBYTES)
    if len(begins) <= 1:
        return _first_masked(descriptor, offset, nbytes, word, mask)

    def look(begin: int) -> int | None:
        share = min(SHARE_NBYTES, nbytes - begin)
        at = _first_masked(descriptor, offset + begin, share, word, mask)
        return None if at is None else begin // word.itemsize + at

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        return next((at for at in pool.map(look, begins) if at is not None), None)


def _first_masked(descriptor: int, offset: int, nbytes: int, word: np.dtype[Any], mask: int) -> int | None:
    """Position of the first element that has all bits of `mask`, or none."""
    bits = word.type(mask)
    scratch = np.empty(CHUNK_NBYTES // word.itemsize, word)
    at = 0
    for chunk in _chunks(descriptor, offset, nbytes, word):
        masked = np.bitwise_and(chunk, bits, out=scratch[: len(chunk)])
        if masked.max() == bits:
            return at + int(masked.argmax())
        at += len(chunk)
    return None


def first_not_bool(descriptor: int, offset: int, nbytes: int) -> int | None:
    """Position of the first byte that is neither 0 nor 1, or none."""
    at = 0
    for chunk in _chunks(descriptor, offset, nbytes, _UINT[1]):
        if chunk.max() > 1:
            return at + int((chunk > 1).argmax())
        at += len(chunk)
    return None


def same_bytes(first: tuple[int, int], second: tuple[int, int], nbytes: int) -> bool:
    """Whether two spans, given by descriptor and offset, hold the same bytes."""
    pairs = zip(*(_chunks(*span, nbytes, _UINT[1]) for span in (first, second)), strict=True)
    return first == second or all(np.array_equal(one, other) for one, other in pairs)


def blocks_of(descriptor: int, offset: int, nbytes: int, dtype: Dtype, size: int) -> tuple[int, ...]:
    """Which blocks of `size` elements the indices fall into, ascending. They must have been scanned."""
    found: set[int] = set()
    for chunk in _chunks(descriptor, offset, nbytes, _INDEX[dtype]):
        blocks = chunk // size
        low = int(blocks.min())
        if int(blocks.max()) - low < len(blocks):  # as they do unless a chunk holds a handful
            found.update((np.flatnonzero(np.bincount(blocks - low)) + low).tolist())
        else:
            found.update(np.unique(blocks).tolist())
    return tuple(sorted(found))


def scan_indices(descriptor: int, offset: int, nbytes: int, dtype: Dtype) -> IndexScan:
    """Lowest and highest index and whether they rise strictly. Raises `IndexFault` on a negative one."""
    low, high, last, count = 2**63 - 1, -1, -1, 0
    increasing = True
    for chunk in _chunks(descriptor, offset, nbytes, _INDEX[dtype]):
        smallest = int(chunk.min())
        if smallest < 0:
            at = int((chunk < 0).argmax())
            raise IndexFault("is negative", count + at)
        low = min(low, smallest)
        high = max(high, int(chunk.max()))
        increasing = increasing and int(chunk[0]) > last and bool((chunk[1:] > chunk[:-1]).all())
        last = int(chunk[-1])
        count += len(chunk)
    return IndexScan(count, low if count else 0, high, increasing)


def first_out_of_range(descriptor: int, offset: int, nbytes: int, dtype: Dtype, numel: int) -> int:
    """Position of the first index that is `numel` or more; there must be one."""
    at = 0
    for chunk in _chunks(descriptor, offset, nbytes, _INDEX[dtype]):
        beyond = chunk >= numel
        if beyond.any():
            return at + int(beyond.argmax())
        at += len(chunk)
    raise ValueError("no index is out of range")


def check_unique(descriptor: int, offset: int, nbytes: int, dtype: Dtype, scan: IndexScan) -> None:
    """Raises `IndexFault` if an index stands twice.

    A list that fits the memory is sorted. A longer one is marked in a bitmap, in as many
    passes over the file as `low` to `high` has windows of `WINDOW` positions.
    """
    if scan.increasing:
        return
    if nbytes <= SORT_NBYTES:
        unique = _unique_sorted(descriptor, offset, nbytes, dtype)
    else:
        unique = scan.count <= scan.high - scan.low + 1 and all(
            _unique_between(descriptor, offset, nbytes, dtype, begin, min(begin + WINDOW, scan.high + 1))
            for begin in range(scan.low, scan.high + 1, WINDOW)
        )
    if not unique:
        raise IndexFault("is repeated")


def _unique_sorted(descriptor: int, offset: int, nbytes: int, dtype: Dtype) -> bool:
    """Whether no index repeats, all of them in memory."""
    raw = np.empty(nbytes, np.uint8)
    _read(descriptor, offset, raw)
    indices = raw.view(_INDEX[dtype])
    indices.sort()
    return not (indices[1:] == indices[:-1]).any()


def _unique_between(descriptor: int, offset: int, nbytes: int, dtype: Dtype, begin: int, end: int) -> bool:
    """Whether none of the indices from `begin` to before `end` repeats.

    Marks are added, not or-ed, which numpy does faster: a mark that is added twice
    carries, and then fewer bits are set than marks were added.
    """
    seen = np.zeros((end - begin + 7) // 8, np.uint8)
    marks = 0
    for chunk in _chunks(descriptor, offset, nbytes, _INDEX[dtype]):
        inside = chunk[(chunk >= begin) & (chunk < end)] - chunk.dtype.type(begin)
        np.add.at(seen, inside >> 3, np.left_shift(np.uint8(1), (inside & 7).astype(np.uint8)))
        marks += len(inside)
    return _ones(seen) == marks


def _ones(seen: NDArray[np.uint8]) -> int:
    """Bits set, counted in pieces."""
    pieces = (seen[at : at + CHUNK_NBYTES] for at in range(0, len(seen), CHUNK_NBYTES))
    return sum(int(np.bitwise_count(piece).sum()) for piece in pieces)


def _chunks(descriptor: int, offset: int, nbytes: int, word: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """The span piece by piece; each piece is valid until the next is asked for."""
    buffer = np.empty(min(CHUNK_NBYTES, nbytes), np.uint8)
    done = 0
    while done < nbytes:
        piece = buffer[: min(CHUNK_NBYTES, nbytes - done)]
        _read(descriptor, offset + done, piece)
        done += len(piece)
        yield piece.view(word)


def _read(descriptor: int, offset: int, into: NDArray[np.uint8]) -> None:
    """Fill `into`; the kernel may return less at a time than was asked for."""
    view = into.data
    while view:
        got = os.preadv(descriptor, [view], offset)
        if not got:
            raise OSError("a staged file became shorter while it was read")
        offset += got
        view = view[got:]
