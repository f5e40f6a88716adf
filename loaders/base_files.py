"""The base checkpoint as the admin sees it: its files, their headers, and writes straight from them."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from blake3 import blake3

from loaders.header import (
    PREFIX_NBYTES,
    HeaderLimits,
    TensorEntry,
    check_file_length,
    header_length,
    parse_header,
)
from schemas.bridge import Span, StagedUpload, TensorWrite

INDEX = "model.safetensors.index.json"
_LIMITS = HeaderLimits(nbytes=256 << 20)


@dataclass(frozen=True)
class BaseFile:
    """One file of the checkpoint; `digest` is of its header and its size."""

    path: Path
    nbytes: int
    digest: str
    entries: dict[str, TensorEntry]


@dataclass(frozen=True)
class BaseFiles:
    """All files of a checkpoint folder, sorted by name."""

    files: tuple[BaseFile, ...]

    @staticmethod
    def open(folder: Path) -> "BaseFiles":
        """Read the headers; blocking.

        Raises OSError or ValueError if the folder can't be read, ProblemError if a header is malformed.
        """
        index = folder / INDEX
        if index.is_file():
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            paths = [folder / name for name in names]
        else:
            paths = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
        if not paths:
            raise FileNotFoundError(f"no safetensors files in {folder}")
        return BaseFiles(tuple(_read(path) for path in paths))

    @property
    def headers(self) -> dict[str, str]:
        """File name → digest of its header."""
        return {file.path.name: file.digest for file in self.files}

    def uploads(self, places: Iterable[tuple[str, int | None]]) -> tuple[StagedUpload, ...]:
        """Dense writes of whole tensors, or experts' slices, with the values that the files have.

        Raises KeyError for a tensor that is in none of them.
        """
        homes = {name: file for file in self.files for name in file.entries}
        writes: dict[Path, list[TensorWrite]] = {}
        for tensor, expert in sorted(places, key=lambda place: (place[0], place[1] or 0)):
            file = homes[tensor]
            writes.setdefault(file.path, []).append(_write(file.entries[tensor], expert))
        return tuple(
            StagedUpload(
                path=str(file.path), nbytes=file.nbytes, blake3=file.digest, writes=tuple(writes[file.path])
            )
            for file in self.files
            if file.path in writes
        )


def _read(path: Path) -> BaseFile:
    with path.open("rb") as handle:
        prefix = handle.read(PREFIX_NBYTES)
        prefix += handle.read(header_length(prefix, _LIMITS))
    nbytes = path.stat().st_size
    header = parse_header(prefix, _LIMITS)
    check_file_length(header.nbytes, nbytes)
    return BaseFile(path, nbytes, blake3(prefix).hexdigest(), header.entries)


def _write(entry: TensorEntry, expert: int | None) -> TensorWrite:
    if expert is None:
        return TensorWrite(tensor=entry.name, values=Span(offset=entry.begin, nbytes=entry.nbytes))
    nbytes = prod(entry.shape[1:]) * entry.dtype.nbytes
    span = Span(offset=entry.begin + expert * nbytes, nbytes=nbytes)
    return TensorWrite(tensor=entry.name, expert=expert, values=span)
