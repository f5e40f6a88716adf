"""Room: memory that a rank may fill without the machine killing what serves.

Values are made ready, and what they will overwrite is kept, in the host's memory. A process that takes more
than there is does not get an error; some process is killed, and mostly that is the engine.
"""

from pathlib import Path

import psutil
from vllm.config import ParallelConfig

from schemas.problems import Code, ProblemError

_CGROUP = Path("/sys/fs/cgroup")
"""Where a container sees the limits that it was given (cgroup v2)."""


class Room:
    """What there is for one of `ranks` that prepare on this machine at the same time."""

    def __init__(self, ranks: int, cgroup: Path = _CGROUP) -> None:
        self._ranks = ranks
        self._cgroup = cgroup

    @classmethod
    def of(cls, parallel: ParallelConfig) -> "Room":
        """For the ranks of an engine on this machine."""
        return cls(parallel.local_world_size * max(parallel.data_parallel_size_local, 1))

    @property
    def available(self) -> int:
        """Bytes that can be taken, of the machine's or the container's; caches of files count as free."""
        machine = psutil.virtual_memory().available
        return int(min(machine, _left_by(self._cgroup, machine))) // self._ranks

    def require(self, needed: int, what: str) -> None:
        """Raises ProblemError `engine_memory` if `needed` bytes for `what` are more than there are."""
        available = self.available
        if needed > available:
            detail = f"{what} takes {needed} bytes at least; {available} are available to each rank."
            raise ProblemError(Code.ENGINE_MEMORY, f"{detail} Send less at once, or free memory.")


def _left_by(cgroup: Path, otherwise: int) -> int:
    """Bytes below the group's limit, or `otherwise` if it has none or that can't be told."""
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        lines = (cgroup / "memory.stat").read_text().splitlines()
        stat = {name: int(value) for name, value in (line.split() for line in lines)}
        return limit - used + stat["inactive_file"] + stat["active_file"]
    except (OSError, ValueError, KeyError):  # the limit may be the word `max`
        return otherwise
