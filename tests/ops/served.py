"""A running `graft serve` whose engine is a stand-in for vLLM's server module."""

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path


class Served:
    """A running `graft serve` and what it has said so far."""

    def __init__(self, process: subprocess.Popen[str], output: Path, state: Path) -> None:
        self.process = process
        self._output = output
        self.state = state

    @property
    def said(self) -> str:
        return self._output.read_text()

    def wait_for(self, pattern: str, timeout_s: float = 30) -> re.Match[str]:
        """The first match of `pattern` in the output."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.said):
                return found
            time.sleep(0.02)
        raise AssertionError(f"{pattern!r} is not in {self.said!r}")

    @property
    def admin(self) -> str:
        return self.wait_for(r"admin: (http://\S+)")[1]

    @property
    def engine_pid(self) -> int:
        return int(self.wait_for(r"engine: process (\d+)")[1])


Serve = Callable[..., Served]
"""Starts one: the stand-in's code, then arguments of `graft serve`, and variables as keywords."""
