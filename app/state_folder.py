"""The folder that one admin process keeps its state in: made, and claimed for as long as it runs."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StateFolderError(Exception):
    """The folder cannot be used; the text says why."""


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make `folder` for this user alone and keep other admins out of it within the block.

    The claim ends with the process, however it ends. Raises StateFolderError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)  # it may have been there with other rights
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise StateFolderError(f"cannot use the state folder {folder}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateFolderError(f"another admin process uses the state folder {folder}") from error
        yield
