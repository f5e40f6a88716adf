"""Fixtures for tests of the command and what it runs."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.listen import listen
from tests.ops.served import Serve, Served

GRAFT = (
    "import app.serve; from app.cli import main;"
    "app.serve.ADMIN_GRACE_S = app.serve.ENGINE_GRACE_S = app.serve.LAST_GRACE_S = 1;"
    "app.serve.HUNG_GRACE_S = 1; app.serve.RESTARTS = 2; app.serve.RESTART_PAUSE_S = 0; main()"
)
"""The command with less patience."""


def _served(folder: Path) -> Iterator[Serve]:
    started: list[Served] = []

    def start(code: str, *arguments: str, **environ: str) -> Served:
        package = folder / "stand-in"
        for name in ("vllm", "entrypoints", "launchers", "api_server"):
            package /= name
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").touch()
        (package / "entry.py").write_text(code)
        # Polling fast: the admin finds a stand-in sooner than a person would need.
        env = {name: value for name, value in os.environ.items() if not name.startswith("GRAFT_")}
        env |= {"PYTHONPATH": str(folder / "stand-in"), "GRAFT_ENGINE_POLL_S": "0.05"}
        output = folder / f"output{len(started)}"
        state = folder / "state"
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", GRAFT, "serve", *arguments, "--port", "0", "--state-dir", str(state)],
                env=env | environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                text=True,
            )
        served = Served(process, output, state)
        started.append(served)
        return served

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.send_signal(signal.SIGTERM)
            served.process.wait(60)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts `graft serve`; the engine is `code`, found in the place of vLLM's server module."""
    yield from _served(tmp_path)


@pytest.fixture(scope="module")
def serve_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """The same for tests that only look at what runs."""
    yield from _served(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on."""
    with listen("127.0.0.1", 0) as probe:
        port: int = probe.getsockname()[1]
    return port
