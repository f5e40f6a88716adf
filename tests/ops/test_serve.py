"""`graft serve` as a process, with a stand-in for vLLM as its child."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from app.listen import listen

GRAFT = "import app.serve; app.serve.ENGINE_GRACE_S = 1; from app.cli import main; main()"
SLOW = "import time; print('loading weights', flush=True); time.sleep(300)"
BROKEN = "import sys; print('no such model: m', flush=True); sys.exit(3)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SLOW


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


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts `graft serve`; the engine is `code`, found in the place of vLLM's server module."""
    started: list[Served] = []

    def start(code: str, *arguments: str, **environ: str) -> Served:
        package = tmp_path / "stand-in"
        for name in ("vllm", "entrypoints", "launchers", "api_server"):
            package /= name
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").touch()
        (package / "entry.py").write_text(code)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GRAFT_")}
        output = tmp_path / f"output{len(started)}"
        state = tmp_path / "state"
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", GRAFT, "serve", *arguments, "--port", "0", "--state-dir", str(state)],
                env=inherited | {"PYTHONPATH": str(tmp_path / "stand-in")} | environ,
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


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_live_answers_long_before_the_engine(serve: Serve) -> None:
    """Within 3 s of the start the admin is alive, and not ready; the best of three starts counts."""
    times = []
    for _ in range(3):
        begun = time.monotonic()
        served = serve(SLOW, "m", "--engine-port", "0")
        assert httpx.get(f"{served.admin}/health/live").status_code == 200
        times.append(time.monotonic() - begun)
        ready = httpx.get(f"{served.admin}/health/ready")
        assert (ready.status_code, ready.json()["code"]) == (503, "engine_unavailable")
        if min(times) < 3:
            return
        served.process.terminate()
        served.process.wait(60)
    raise AssertionError(f"alive after {times} s")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_service_and_engine(serve: Serve, number: signal.Signals) -> None:
    """The foreground process ends with status 0 and leaves no engine behind."""
    served = serve(SLOW, "m", "--engine-port", "0")
    pid = served.engine_pid
    assert _alive(pid)
    served.process.send_signal(number)
    assert served.process.wait(60) == 0
    assert not _alive(pid)


def test_an_engine_that_ignores_the_end_is_killed(serve: Serve) -> None:
    """The whole thing is over within a minute even if vLLM does not react."""
    served = serve(STUBBORN, "m", "--engine-port", "0")
    pid = served.engine_pid
    served.wait_for("loading weights")
    served.process.terminate()
    served.process.wait(60)
    assert not _alive(pid)


def test_a_failed_start_ends_with_the_engines_last_words(serve: Serve) -> None:
    """An engine that cannot start ends the service: non-zero, with the end of its log."""
    served = serve(BROKEN, "m", "--engine-port", "0")
    assert served.process.wait(60) == 1
    assert "the engine ended with status 3" in served.said
    assert "no such model: m" in served.said
    assert "Traceback" not in served.said


def test_an_engine_that_dies_ends_the_service(serve: Serve) -> None:
    """A killed engine is not papered over: non-zero status, naming the signal's status."""
    served = serve(SLOW, "m", "--engine-port", "0")
    served.wait_for("loading weights")
    os.kill(served.engine_pid, signal.SIGKILL)
    assert served.process.wait(60) == 1
    assert "the engine ended with status -9" in served.said


def test_progress_is_said_in_plain_lines(serve: Serve) -> None:
    """Without a terminal, what the engine logs appears as lines, and in the status."""
    served = serve(SLOW, "m", "--engine-port", "0")
    served.wait_for(r"starting the engine, \d+ s: loading weights")
    engine = httpx.get(f"{served.admin}/v1/status").json()["engine"]
    assert engine["progress"]["detail"] == "loading weights"


def test_the_engine_gets_its_secret_by_a_private_file(serve: Serve) -> None:
    """The file named in the engine's environment exists, is private, and is not the admin's token."""
    code = (
        "import os; p = os.environ['GRAFT_ENGINE_SECRET_FILE'];"
        "print('mode', oct(os.stat(p).st_mode & 0o777), os.environ.get('GRAFT_TOKEN'), flush=True);" + SLOW
    )
    served = serve(code, "m", "--engine-port", "0", GRAFT_TOKEN="t")
    served.wait_for("loading weights")
    assert "mode 0o600 None" in (served.state / "engine.log").read_text()
    assert served.state.stat().st_mode & 0o777 == 0o700
    assert httpx.get(f"{served.admin}/v1/status").status_code == 401


def test_taken_ports_are_named_before_anything_starts(serve: Serve) -> None:
    """Where the engine's port is taken the service says so and starts no engine."""
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        served = serve(SLOW, "m", "--engine-port", str(port))
        assert served.process.wait(60) == 1
    assert f"127.0.0.1:{port} is in use" in served.said
    assert not (served.state / "engine.log").exists()


def test_a_state_folder_belongs_to_one_admin(serve: Serve) -> None:
    """A second admin on the same folder is refused while the first runs, and not after."""
    first = serve(SLOW, "m", "--engine-port", "0")
    assert first.admin
    second = serve(SLOW, "m", "--engine-port", "0")
    assert second.process.wait(60) == 1
    assert "another admin process uses the state folder" in second.said
    first.process.kill()
    os.killpg(first.engine_pid, signal.SIGKILL)
    first.process.wait(60)
    assert serve(SLOW, "m", "--engine-port", "0").engine_pid


def test_attached_to_an_engine_that_is_not_there(serve: Serve, tmp_path: Path) -> None:
    """Attached mode starts no engine: it is alive, says what it waits for, and ends on a signal."""
    secret = tmp_path / "secret"
    secret.write_text("s")
    served = serve(SLOW, "--engine", "http://127.0.0.1:9", "--engine-secret-file", str(secret))
    assert httpx.get(f"{served.admin}/health/ready").json()["code"] == "engine_unavailable"
    served.process.terminate()
    assert served.process.wait(60) == 0
    assert "engine: http://127.0.0.1:9 (attached)" in served.said
    assert not (served.state / "engine.log").exists()
