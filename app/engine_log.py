"""The engine's log file: its last lines, and what it says the engine is doing."""

import re
from pathlib import Path

_TAIL_BYTES = 64 * 1024
# "(EngineCore pid=7) INFO 11-29 21:33:38 [weight_utils.py:12] Loading weights took 2 s"
_PREFIX = re.compile(r"^(\(\w+[^)]*\)\s*)?((DEBUG|INFO|WARNING|ERROR)\s+\S+\s+\S+\s+\[[^\]]*\]\s*)?")


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines that are not blank; none if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    # Progress bars return to the start of their line instead of ending it.
    lines = re.split(r"[\r\n]+", text)
    return [line.rstrip() for line in lines if line.strip()][-count:]


def doing(path: Path) -> str:
    """The last line without process names, times and places in the source; empty if there is none."""
    lines = last_lines(path, 1)
    return _PREFIX.sub("", lines[0]).strip() if lines else ""
