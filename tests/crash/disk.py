"""A small file system of its own, to be filled."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class SmallDisk:
    """A tmpfs in memory."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        """Raises CalledProcessError where mounting is not allowed."""
        self.folder = folder
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
        subprocess.run(command, check=True, capture_output=True)

    def free(self) -> int:
        """Bytes."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    @contextmanager
    def full(self, but: int = 0) -> Iterator[None]:
        """All but so many bytes of it are used up."""
        filler = self.folder / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            for _ in range(max(0, self.free() - but) // 4096):
                file.write(b"x" * 4096)
        try:
            yield
        finally:
            filler.unlink()

    def close(self) -> None:
        """Unmount it."""
        subprocess.run(["umount", str(self.folder)], check=True)
