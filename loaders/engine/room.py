"""Room: memory that a rank may fill without the machine killing what serves.

Values are made ready, and what they will overwrite is kept, in the host's memory. A process that takes more
than there is does not get an error; some process is killed, and mostly that is the engine.

Other ranks of the machine prepare too. They need more or less than this one (experts, stages of a pipeline),
and have taken none, some or all of it when this one looks. So a rank asks for itself alone, lest what fits be
refused; together they may still take more than there is.
"""

from pathlib import Path

import psutil

from schemas.problems import Code, ProblemError

_CGROUP = Path("/sys/fs/cgroup")
"""Where a container sees the limits that it was given (cgroup v2)."""
_RECLAIMED = ("inactive_file", "active_file", "slab_reclaimable")
"""Lines of `memory.stat`: what counts as used, and is given up for those who need it."""


class Room:
    """What there is on this machine, and in the container `cgroup`."""

    def __init__(self, cgroup: Path = _CGROUP) -> None:
        self._cgroup = cgroup

    @property
    def available(self) -> int:
        """Bytes that can be taken, of the machine's or the container's; caches of files count as free."""
        machine = int(psutil.virtual_memory().available)
        return max(0, min(machine, _left_by(self._cgroup, machine)))

    def require(self, needed: int, what: str) -> None:
        """Raises ProblemError `engine_memory` if `needed` bytes for `what` are more than there are."""
        available = self.available
        if needed > available:
            detail = f"{what} takes {needed} bytes at least; {available} are available."
            raise ProblemError(Code.ENGINE_MEMORY, f"{detail} Send less at once, or free memory.")


def _left_by(cgroup: Path, otherwise: int) -> int:
    """Bytes below the group's limit, or `otherwise` if it has none or that can't be told."""
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        lines = (cgroup / "memory.stat").read_text().splitlines()
        stat = {name: int(value) for name, value in (line.split() for line in lines)}
        return limit - used + sum(stat[name] for name in _RECLAIMED)
    except (OSError, ValueError, KeyError):  # the limit may be the word `max`
        return otherwise
