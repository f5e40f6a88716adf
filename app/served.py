"""The folder that the engine was started on, as it lies on disk now."""

from pathlib import Path

from loaders.folder import CheckpointFolder
from loaders.header import HeaderLimits
from schemas.problems import Code, ProblemError

_LIMITS = HeaderLimits(nbytes=256 << 20)


class ServedFolder:
    """Reads the headers when they are first asked for, and again once somebody has written to the files."""

    def __init__(self, path: str | None) -> None:
        """`path` is what the engine says of itself, if it does."""
        self._path = path
        self._read: CheckpointFolder | None = None

    def files(self) -> CheckpointFolder:
        """The files; blocking. Raises `bad_checkpoint`."""
        if self._path is None:
            detail = "The engine does not say which folder it was loaded from."
            raise ProblemError(Code.BAD_CHECKPOINT, detail)
        if self._read is None or not all(shard.unchanged() for shard in self._read.shards):
            self._read = CheckpointFolder.open(Path(self._path), _LIMITS)
        return self._read
