"""Failpoints of the admin: named places where a test makes it die, lose its engine, or find the disk full.

Off unless `GRAFT_FAILPOINTS` names a folder. A file in it called like a failpoint fires
that failpoint once. What it says is done: `kill` ends this process on the spot, `kill`
followed by process ids, or by files that hold one, ends those instead (`self` is this one);
`full` is a full disk.
"""

import errno
import os
import signal
from pathlib import Path

STATUS = 86
"""Exit status of a process that ended itself at a failpoint."""


class Failpoints:
    """The failpoints of one admin."""

    def __init__(self) -> None:
        folder = os.environ.get("GRAFT_FAILPOINTS")
        self._folder = Path(folder) if folder else None

    def reach(self, name: str) -> None:
        """Do what a test has armed this point with. Raises OSError for a full disk."""
        if self._folder is None:
            return
        armed = self._folder / name
        try:
            what, *others = armed.read_text().split()
            armed.unlink()
        except FileNotFoundError:
            return
        if what == "full":
            raise OSError(errno.ENOSPC, f"failpoint {name}")
        for other in [one for one in others if one != "self"]:
            pid = other if other.isdigit() else Path(other).read_text()
            os.kill(int(pid), signal.SIGKILL)
        if not others or "self" in others:
            os._exit(STATUS)
