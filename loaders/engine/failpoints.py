"""Failpoints: named places where a test makes a worker fail, hang or die.

Off unless `GRAFT_FAILPOINTS` names a folder. A file in it called like a failpoint
fires that failpoint once: the file is removed, and what it says is done. `hang`
stays there until a file called `go-on` is in the folder, `die` ends the process as
`kill -9` would, and an empty file raises. A name may be qualified by a rank, as in
`apply.middle@1`.
"""

import os
import signal
import time
from pathlib import Path

_LOOK_S = 0.05


class Injected(Exception):
    """Raised by a failpoint."""


class Failpoints:
    """The failpoints of one rank."""

    def __init__(self, rank: int) -> None:
        folder = os.environ.get("GRAFT_FAILPOINTS")
        self._folder = Path(folder) if folder else None
        self._rank = rank

    def reach(self, name: str) -> None:
        """Do what a test has armed this point with. Raises Injected if that is to fail."""
        if self._folder is None:
            return
        for armed in (self._folder / name, self._folder / f"{name}@{self._rank}"):
            try:
                what = armed.read_text().strip()
                armed.unlink()
            except FileNotFoundError:  # not armed, or another rank was faster
                continue
            if what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if what != "hang":
                raise Injected(f"failpoint {name} on rank {self._rank}")
            while not (self._folder / "go-on").exists():
                time.sleep(_LOOK_S)
