"""Failpoints: named places where a test makes a worker fail.

Off unless `GRAFT_FAILPOINTS` names a folder. A file in it called like a failpoint
fires that failpoint once: the file is removed and the point raises. A name may be
qualified by a rank, as in `apply.middle@1`.
"""

import os
from pathlib import Path


class Injected(Exception):
    """Raised by a failpoint."""


class Failpoints:
    """The failpoints of one rank."""

    def __init__(self, rank: int) -> None:
        folder = os.environ.get("GRAFT_FAILPOINTS")
        self._folder = Path(folder) if folder else None
        self._rank = rank

    def reach(self, name: str) -> None:
        """Raise Injected if a test has armed this point."""
        if self._folder is None:
            return
        for armed in (self._folder / name, self._folder / f"{name}@{self._rank}"):
            try:
                armed.unlink()
            except FileNotFoundError:  # not armed, or another rank was faster
                continue
            raise Injected(f"failpoint {name} on rank {self._rank}")
