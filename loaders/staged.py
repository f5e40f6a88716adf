"""Bodies on disk: received, measured and hashed, with a checked header; not yet checked against a model."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from loaders.header import Header


@dataclass(frozen=True)
class StagedFile:
    """A complete safetensors file on disk; whoever holds it unlinks it."""

    path: Path
    nbytes: int
    blake3: str
    """Digest of all bytes, 64 lower-case hex digits."""
    header: Header

    def unlink(self) -> None:
        """Remove the file; fine if it is gone already."""
        self.path.unlink(missing_ok=True)


def fsync_all(files: Iterable[StagedFile]) -> None:
    """Make files and their directory entries durable; blocking. Raises `OSError`."""
    paths = [file.path for file in files]
    for path in [*paths, *dict.fromkeys(path.parent for path in paths)]:
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
