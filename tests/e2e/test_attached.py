"""vLLM as docker-compose.yml starts it, and Graft attached to it: one engine, and the one after it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.supervisor import ENTRY
from tests.e2e.conftest import Stacks
from tests.e2e.stack import START_S, Stack, free_port
from tests.ops.compose import composed
from tests.ops.tools import ROOT

PROMPT = list(range(5, 25))


class Attached(Stack):
    """The services of the profile `cpu`, with this machine's ports and folders for the containers'."""

    engine: "subprocess.Popen[bytes] | None" = None

    def _service(self, name: str) -> tuple[list[str], dict[str, str]]:
        service = composed(MODEL=str(self.model))["services"][name]
        places = {
            "http://engine:8000": self.inference,
            "--port=8000": f"--port={self.inference.rpartition(':')[2]}",
            "0.0.0.0": "127.0.0.1",
            "/run/secrets": str(self.folder),
        }

        def here(text: str) -> str:
            for place, replacement in places.items():
                text = text.replace(place, replacement)
            return text

        env = {name: here(value) for name, value in service["environment"].items()}
        return [here(part) for part in service["command"]], {**os.environ, **env}

    def start_engine(self) -> None:
        command, env = self._service("engine-cpu")
        with (self.folder / "engine.log").open("ab") as log:
            self.engine = subprocess.Popen(
                [sys.executable, "-P", "-m", ENTRY, *command, "--max-model-len=1024"],
                env={**env, "VLLM_CPU_OMP_THREADS_BIND": self.cores},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_admin(self) -> None:
        command, env = self._service("graft-cpu")
        own = ["--port", self.admin.rpartition(":")[2], "--state-dir", str(self.folder / "state")]
        with (self.folder / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).parent / "graft"), *command, *own],
                env={**env, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def end_engine(self) -> None:
        """As `docker stop` does, and then whatever is left of it."""
        assert self.engine is not None
        self.engine.terminate()
        try:
            self.engine.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.engine.pid, signal.SIGKILL)
            self.engine.wait()

    def wait(self, status: int) -> dict[str, str]:
        """What /health/ready says once it answers with `status`."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            assert self.process is not None and self.process.poll() is None, self.log
            try:
                answer = self.call("GET", "/health/ready")
            except httpx.ConnectError:
                pass  # it is only about to listen
            else:
                if answer.status_code == status:
                    document: dict[str, str] = answer.json()
                    return document
            time.sleep(0.2)
        raise AssertionError((self.folder / "engine.log").read_text()[-5000:])


@pytest.fixture
def attached(stacks: Stacks, gptoss_model: Path, tmp_path: Path) -> Iterator[Attached]:
    """Both processes, the engine still loading."""
    stacks.close()  # this engine takes a core, and leaves one
    made = Attached(gptoss_model, tmp_path)
    for name in ("token", "engine"):
        (tmp_path / name).write_text(f"{name}-secret\n")
    made.admin, made.inference = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    made.http.headers["authorization"] = "Bearer token-secret"
    made.start_engine()
    made.start_admin()
    yield made
    made.stop()
    made.end_engine()


def test_graft_attached_to_an_engine_and_to_the_next(attached: Attached) -> None:
    """Commits go to an engine that somebody else started; the one after it is proved to be at its base first.

    The new engine is brought to the version, with the same answers and digests. A service that is started
    again finds the engine at a version that it knows, and changes nothing.
    """
    attached.wait(200)
    before = attached.complete(PROMPT)
    expert = attached.call("GET", "/v1/experts/0/1").content
    attached.put_expert(0, 0, expert)
    changed, digests = attached.complete(PROMPT), attached.digests()
    assert changed != before

    attached.end_engine()
    assert attached.wait(503)["code"] == "engine_unavailable"
    attached.start_engine()
    assert attached.wait(200)["version"] == "1"
    assert attached.digests() == digests
    assert attached.complete(PROMPT) == changed

    attached.kill_admin()
    attached.start_admin()
    assert attached.wait(200)["version"] == "1"
    assert attached.digests() == digests
    attached.rollback(0)
    assert attached.complete(PROMPT) == before
