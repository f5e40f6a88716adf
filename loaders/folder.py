"""A checkpoint folder as it lies on disk: its safetensors files, their headers, and what lies beside them."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from blake3 import blake3

from loaders.header import (
    PREFIX_NBYTES,
    Header,
    HeaderLimits,
    TensorEntry,
    check_file_length,
    header_length,
    parse_header,
)
from schemas.bridge import Span, StagedUpload, TensorWrite
from schemas.problems import Code, ProblemError

INDEX = "model.safetensors.index.json"
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")

Stamp = tuple[int, int, int]
"""Inode, size and time of change of a file: equal as long as nobody has written to it."""


@dataclass(frozen=True)
class Shard:
    """One safetensors file of the folder, with a checked header."""

    path: Path
    """In the folder; may be a link."""
    header: Header
    digest: str
    """BLAKE3 of the header's bytes."""
    stamp: Stamp

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.header.nbytes

    def unchanged(self) -> bool:
        """Whether the file is still the one whose header was read; blocking."""
        try:
            return _stamp(self.path.stat()) == self.stamp
        except OSError:
            return False


@dataclass(frozen=True)
class CheckpointFolder:
    """The files that an engine would load from a folder."""

    path: Path
    shards: tuple[Shard, ...]

    @staticmethod
    def open(path: Path, limits: HeaderLimits) -> "CheckpointFolder":
        """Read the headers; blocking.

        Raises bad_checkpoint if the folder has no safetensors files, or one that can't be
        read, is malformed, or is not all of what its header announces.
        """
        try:
            names = _names(path)
            if not names:
                raise ProblemError(Code.BAD_CHECKPOINT, f"There are no safetensors files in {path}.")
            return CheckpointFolder(path, tuple(_shard(path / name, limits) for name in names))
        except OSError as error:
            where = error.filename or path
            raise ProblemError(Code.BAD_CHECKPOINT, f"{where} can't be read: {error.strerror}.") from error

    @staticmethod
    def of_file(path: Path, limits: HeaderLimits) -> "CheckpointFolder":
        """One file, as if it were the only one of its folder; blocking. Raises as `open`."""
        try:
            return CheckpointFolder(path.parent, (_shard(path, limits),))
        except OSError as error:
            raise ProblemError(Code.BAD_CHECKPOINT, f"{path} can't be read: {error.strerror}.") from error

    def entries(self) -> Iterator[tuple[Shard, TensorEntry]]:
        """Every tensor with the file that it is in."""
        for shard in self.shards:
            for entry in shard.header.entries.values():
                yield shard, entry

    @property
    def headers(self) -> dict[str, str]:
        """File name → digest of its header."""
        return {shard.path.name: shard.digest for shard in self.shards}

    @property
    def stamps(self) -> dict[str, Stamp]:
        """File name → stamp."""
        return {shard.path.name: shard.stamp for shard in self.shards}

    def uploads(self, places: Iterable[tuple[str, int | None]]) -> tuple[StagedUpload, ...]:
        """Dense writes of whole tensors, or experts' slices, with the values that the files have.

        Raises KeyError for a tensor that is in none of them.
        """
        homes = {entry.name: (shard, entry) for shard, entry in self.entries()}
        writes: dict[Path, list[TensorWrite]] = {}
        for tensor, expert in sorted(places, key=lambda place: (place[0], place[1] or 0)):
            shard, entry = homes[tensor]
            writes.setdefault(shard.path, []).append(_write(entry, expert))
        return tuple(
            StagedUpload(
                external=True,
                path=str(shard.path),
                nbytes=shard.nbytes,
                blake3=shard.digest,
                writes=tuple(writes[shard.path]),
            )
            for shard in self.shards
            if shard.path in writes
        )

    def others(self) -> list[Path]:
        """The plain files that hold no weights: configuration, index, tokenizer; blocking."""
        files = (path for path in sorted(self.path.iterdir()) if path.is_file())
        return [path for path in files if path.suffix not in _OTHER_WEIGHTS]


def _names(path: Path) -> list[str]:
    """Names of the safetensors files, as vLLM finds them: by the index, else all there are."""
    if not (path / INDEX).is_file():
        return sorted(file.name for file in path.glob("*.safetensors") if file.is_file())
    try:
        names = sorted(set(json.loads((path / INDEX).read_bytes())["weight_map"].values()))
        if all(Path(name).name == name for name in names):
            return names
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProblemError(Code.BAD_CHECKPOINT, f"{path / INDEX} has no weight map.") from error
    raise ProblemError(Code.BAD_CHECKPOINT, f"{path / INDEX} names files outside its folder.")


def _shard(path: Path, limits: HeaderLimits) -> Shard:
    try:
        with path.open("rb") as file:
            stamp = _stamp(os.fstat(file.fileno()))
            prefix = file.read(PREFIX_NBYTES)
            prefix += file.read(header_length(prefix, limits))
            header = parse_header(prefix, limits)
            check_file_length(header.nbytes, stamp[1])
    except ProblemError as error:
        raise ProblemError(Code.BAD_CHECKPOINT, f"{path}: {error.detail}", cause=error.code) from error
    return Shard(path, header, blake3(prefix).hexdigest(), stamp)


def _write(entry: TensorEntry, expert: int | None) -> TensorWrite:
    if expert is None:
        return TensorWrite(tensor=entry.name, values=Span(offset=entry.begin, nbytes=entry.nbytes))
    nbytes = prod(entry.shape[1:]) * entry.dtype.nbytes
    span = Span(offset=entry.begin + expert * nbytes, nbytes=nbytes)
    return TensorWrite(tensor=entry.name, expert=expert, values=span)


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns
