"""From one checkpoint to another as a patch batch: both are read once, in windows, whatever their size."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

import numpy as np

from app.remote.bodies import Body, Part, Watch, safetensors
from app.remote.patches import METADATA_KEY, index_type, list_text, sparse_nbytes
from app.remote.tensors import CHUNK_NBYTES, Bits
from loaders.folder import CheckpointFolder
from loaders.header import HeaderLimits, TensorEntry
from schemas.dtypes import Dtype
from schemas.patches import Patch

LISTED = 10
"""Tensors that a refusal names; the others are counted."""
_WINDOW_NBYTES = 2 << 20
_INDEX_DTYPES = {4: Dtype.I32, 8: Dtype.I64}


class DiffError(Exception):
    """The two can't be compared; the text says why."""


@dataclass(frozen=True)
class Stored:
    """Bytes in a file that are a tensor."""

    path: Path
    dtype: Dtype
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    @staticmethod
    def of(path: Path, entry: TensorEntry) -> "Stored":
        """A tensor of a safetensors file."""
        return Stored(path, entry.dtype, entry.shape, entry.begin, entry.nbytes)

    def chunks(self) -> Iterator[bytes]:
        """The bytes in pieces. Raises OSError."""
        with self.path.open("rb") as file:
            yield from _pieces(file, self.begin, self.nbytes, CHUNK_NBYTES)

    def windows(self) -> Iterator[Bits]:
        """The elements in windows of bounded size. Raises OSError."""
        with self.path.open("rb") as file:
            for piece in _pieces(file, self.begin, self.nbytes, _WINDOW_NBYTES):
                yield np.frombuffer(piece, f"<u{self.dtype.nbytes}")


@dataclass(frozen=True)
class Spooled:
    """A tensor in a temporary file."""

    file: BinaryIO
    dtype: Dtype
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    def chunks(self) -> Iterator[bytes]:
        """The bytes in pieces."""
        yield from _pieces(self.file, self.begin, self.nbytes, CHUNK_NBYTES)


@dataclass(frozen=True)
class Difference:
    """A patch batch that leads from the old checkpoint to the new one, and what it consists of."""

    body: Body | None
    """None if the two are equal, bit for bit."""
    tensors: int
    """Tensors of either checkpoint."""
    sparse: int
    dense: int
    elements: int
    """Elements that are written."""


def read_tensors(path: Path) -> dict[str, Stored]:
    """The tensors of a checkpoint folder or of one safetensors file, in the order of their bytes.

    Raises DiffError, and ProblemError with bad_checkpoint for what is malformed.
    """
    read = CheckpointFolder.open if path.is_dir() else CheckpointFolder.of_file
    found: dict[str, Stored] = {}
    for shard, entry in read(path, HeaderLimits()).entries():
        if entry.name in found:
            raise DiffError(f"{entry.name} is in {found[entry.name].path} and in {shard.path}")
        found[entry.name] = Stored.of(shard.path, entry)
    return dict(sorted(found.items(), key=lambda item: (item[1].path, item[1].begin)))


def check_alike(old: dict[str, Stored], new: dict[str, Stored]) -> None:
    """Raises DiffError unless both have the same tensors: patches change values and nothing else."""
    faults = [f"{name} is only in the old checkpoint" for name in sorted(old.keys() - new.keys())]
    faults += [f"{name} is only in the new checkpoint" for name in sorted(new.keys() - old.keys())]
    for name in sorted(old.keys() & new.keys()):
        before, after = old[name], new[name]
        if before.dtype is not after.dtype:
            faults.append(f"{name} was {before.dtype} and is {after.dtype}")
        elif before.shape != after.shape:
            faults.append(f"{name} was {list(before.shape)} and is {list(after.shape)}")
    if faults:
        more = [f"and {len(faults) - LISTED} more"] if len(faults) > LISTED else []
        raise DiffError("\n".join(["these are not two states of one model:", *faults[:LISTED], *more]))


@contextmanager
def difference(old: Path, new: Path, room: Path, watch: Watch) -> Iterator[Difference]:
    """Compare bit for bit; the body can be read within the context. `room` is a folder for temporary files.

    Each tensor that differs is sparse or dense, whichever takes fewer bytes. Raises DiffError, OSError, and
    ProblemError with bad_checkpoint.
    """
    before, after = read_tensors(old), read_tensors(new)
    check_alike(before, after)
    with ExitStack() as stack:
        spool = _Spool(*(stack.enter_context(TemporaryFile(dir=room)) for _ in range(2)))
        yield _compared(before, after, spool, watch)


def _compared(
    before: dict[str, Stored], after: dict[str, Stored], spool: "_Spool", watch: Watch
) -> Difference:
    patches: list[Patch] = []
    parts: dict[str, Part] = {}
    done, total, elements = 0, sum(one.nbytes for one in after.values()), 0
    for name, stored in after.items():
        found = _changed(before[name], stored, spool)
        done += stored.nbytes
        watch(done, total)
        if found is None:
            continue
        values, indices = f"{len(patches)}.values", f"{len(patches)}.indices" if len(found) > 1 else None
        parts[values] = found[0]
        if indices is not None:
            parts[indices] = found[1]
        patches.append(
            Patch(name=name, shape=stored.shape, dtype=stored.dtype, values=values, indices=indices)
        )
        elements += found[0].nbytes // stored.dtype.nbytes
    sparse = sum(patch.indices is not None for patch in patches)
    body = safetensors(parts, {METADATA_KEY: list_text(patches)}) if patches else None
    return Difference(body, len(after), sparse, len(patches) - sparse, elements)


def _changed(before: Stored, after: Stored, spool: "_Spool") -> tuple[Part, ...] | None:
    """New values and their positions, or all values alone if that is smaller; none if nothing differs."""
    numel = after.nbytes // after.dtype.nbytes
    index, count, at = index_type(numel), 0, 0
    spool.mark()
    for old, new in zip(before.windows(), after.windows(), strict=True):
        differs = old != new
        count += int(np.count_nonzero(differs))
        if sparse_nbytes(count, numel, after.dtype) >= after.nbytes:
            spool.rewind()
            return (after,)
        spool.add((np.flatnonzero(differs) + at).astype(index), new[differs])
        at += new.size
    if not count:
        return None
    return spool.since_mark(after.dtype, _INDEX_DTYPES[index.itemsize])


class _Spool:
    """Positions and values of sparse patches, in two files, until it is known how many there are."""

    def __init__(self, indices: BinaryIO, values: BinaryIO) -> None:
        self._indices = indices
        self._values = values
        self._marks = (0, 0)

    def mark(self) -> None:
        """Where the next tensor begins."""
        self._marks = (self._indices.tell(), self._values.tell())

    def rewind(self) -> None:
        """Forget what was added since the mark."""
        for file, mark in zip((self._indices, self._values), self._marks, strict=True):
            file.seek(mark)
            file.truncate()

    def add(self, indices: np.ndarray[tuple[int], np.dtype[np.signedinteger]], values: Bits) -> None:
        """Positions and the values there."""
        self._indices.write(indices.tobytes())
        self._values.write(values.tobytes())

    def since_mark(self, dtype: Dtype, index: Dtype) -> tuple[Spooled, Spooled]:
        """What was added since the mark: values and positions."""
        for file in (self._indices, self._values):
            file.flush()
        return self._part(self._values, self._marks[1], dtype), self._part(
            self._indices, self._marks[0], index
        )

    @staticmethod
    def _part(file: BinaryIO, begin: int, dtype: Dtype) -> Spooled:
        nbytes = file.tell() - begin
        return Spooled(file, dtype, (nbytes // dtype.nbytes,), begin, nbytes)


def _pieces(file: BinaryIO, begin: int, nbytes: int, size: int) -> Iterator[bytes]:
    """Bytes of a file, without moving its position. Raises OSError if there are too few."""
    end = begin + nbytes
    while begin < end:
        piece = os.pread(file.fileno(), min(size, end - begin), begin)
        want = min(size, end - begin)
        while len(piece) < want:  # a read may come short of what is there
            more = os.pread(file.fileno(), want - len(piece), begin + len(piece))
            if not more:
                raise OSError(f"{file.name} became shorter while it was read")
            piece += more
        yield piece
        begin += want
