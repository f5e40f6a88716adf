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

_FAKE = """
import argparse, asyncio, os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
import uvicorn
from tests.fakes.engine import FakeEngine

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
port = parser.parse_known_args()[0].port
engine = FakeEngine(secret=Path(os.environ["GRAFT_ENGINE_SECRET_FILE"]).read_text())
engine.boot = os.urandom(8).hex()
engine.restart()
{more}
uvicorn.run(engine.app, host="127.0.0.1", port=port, log_level="warning")
"""


def fake_engine(more: str = "") -> str:
    """Code of a stand-in that is the fake engine; `more` can change `engine` before it serves."""
    return _FAKE.format(root=str(Path(__file__).parents[2]), more=more)
