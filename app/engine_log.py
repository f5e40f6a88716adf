"""The engine's log file: its last lines, and what it says the engine is doing."""

import re
from pathlib import Path

_TAIL_BYTES = 64 * 1024
# "(EngineCore pid=7) INFO 11-29 21:33:38 [weight_utils.py:12] Loading weights took 2 s"
_MESSAGE = re.compile(r"^(?:\(\w+[^)]*\)\s*)?(?:DEBUG|INFO|WARNING|ERROR)\s+\S+\s+\S+\s+\[[^\]]*\]\s*(.*)")
_ERROR = re.compile(r"(?:^|\s)(\w*(?:Error|Exception): .*)$", re.MULTILINE)
_BAR = re.compile(r"\d%")


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


def errors(text: str) -> list[str]:
    """The distinct exceptions that the engine's output tells of, the first one (the root cause) first."""
    return list(dict.fromkeys(_ERROR.findall(text)))


def doing(path: Path) -> str:
    """The last message or progress bar, without process name, time and place; empty if there is none."""
    for line in reversed(last_lines(path, 200)):
        if message := _MESSAGE.match(line):
            return message[1]
        if _BAR.search(line):
            return line
    return ""
