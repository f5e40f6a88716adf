"""Bodies on disk: received, measured and hashed, with a checked header; not yet checked against a model."""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from loaders.header import Header
from schemas.problems import Code, ProblemError

_HASHED = 16 << 20


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
    """Make files and their directory entries durable; blocking.

    Some file systems find out only now that there is no room: raises `disk_full`, or `OSError`.
    """
    paths = [file.path for file in files]
    with refuse_full_disk():
        for path in [*paths, *dict.fromkeys(path.parent for path in paths)]:
            fsync_path(path)


@contextmanager
def refuse_full_disk() -> Iterator[None]:
    """Turn the faults of a full disk, a used-up quota or a limit on files into `disk_full`.

    Others stay `OSError`.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ProblemError(Code.DISK_FULL, "There is no room left on the disk.") from error


def fsync_path(path: Path) -> None:
    """Make a file, or the entries of a folder, durable; blocking."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """BLAKE3 of a file, 64 lower-case hex digits; blocking.

    Read rather than mapped: somebody may cut the file short meanwhile. Raises OSError.
    """
    digest = blake3(max_threads=blake3.AUTO)
    with path.open("rb") as file:
        while chunk := file.read(_HASHED):
            digest.update(chunk)
    return digest.hexdigest()
