"""Processes that may be nobody's child any more: known again by id and time of start."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loaders.staged import fsync_path

STARTED_FIELD = 19
"""Of /proc/PID/stat, counted after the name: clock ticks from boot to the process's start."""


@dataclass(frozen=True)
class ProcessRecord:
    """A process group's leader, and the command that it runs."""

    pid: int
    started: int
    argv: tuple[str, ...]

    @staticmethod
    def of(pid: int, argv: Sequence[str]) -> "ProcessRecord":
        """The record of a process that runs. Raises ProcessLookupError if it has ended."""
        started = _started(pid)
        if started is None:
            raise ProcessLookupError(pid)
        return ProcessRecord(pid, started, tuple(argv))

    @staticmethod
    def read(path: Path) -> "ProcessRecord | None":
        """What was written, if it can be made out."""
        try:
            found = json.loads(path.read_text("utf-8"))
            return ProcessRecord(int(found["pid"]), int(found["started"]), tuple(found["argv"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Put it where a later process finds it, whole or not at all."""
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps(asdict(self)), "utf-8")
        fsync_path(draft)
        draft.replace(path)
        fsync_path(path.parent)

    @property
    def alive(self) -> bool:
        """Whether this very process still runs."""
        return _started(self.pid) == self.started


def _started(pid: int) -> int | None:
    """When a process was started; none if there is none, or only what is left until somebody waits for it."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if state == "Z" or os.getpgid(pid) != pid:
            return None
        return int(fields[STARTED_FIELD - 1])
    except (OSError, ValueError, IndexError):
        return None
