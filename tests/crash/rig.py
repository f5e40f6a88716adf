"""A real admin process before a fake engine process: started, armed, killed, started again."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from app.listen import listen
from schemas.bridge import PREFIX
from tests.fakes.admin import OCTETS

ROOT = Path(__file__).parents[2]
PATIENCE_S = 180.0


class Lost(Exception):
    """Something that was acknowledged is not there, or does not come back."""


class Rig:
    """Both processes, and clients of both, over one state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.armed = folder / "failpoints"
        self.armed.mkdir(parents=True)
        self.secret = folder / "secret"
        self.secret.write_text("between-us")
        with listen("127.0.0.1", 0) as probe:
            self.engine_port: int = probe.getsockname()[1]
        self._admin: subprocess.Popen[bytes] | None = None
        self._engine: subprocess.Popen[bytes] | None = None
        self._url = ""
        self._starts = 0
        self.start_engine()
        self.start_admin()

    def start_engine(self) -> None:
        """Start an engine at the base, and wait until it answers."""
        arguments = ["--port", str(self.engine_port), "--ranks", "2"]
        arguments += ["--secret", str(self.secret), "--base", str(self.folder / "base")]
        self._engine = self._start("engine", ["-m", "tests.fakes.engine", *arguments])
        self._wait(lambda: self._engine_answers(), "the engine does not come up")

    def start_admin(self) -> None:
        """Start an admin on an old port or a new one, and wait until it answers."""
        arguments = ["serve", "--port", "0", "--state-dir", str(self.folder / "state")]
        arguments += ["--engine", f"http://127.0.0.1:{self.engine_port}"]
        arguments += ["--engine-secret-file", str(self.secret)]
        log = self.folder / f"admin{self._starts}.log"
        self._admin = self._start("admin", ["-m", "app.cli", *arguments])
        self._wait(lambda: self._said(log), "the admin does not come up")

    def _said(self, log: Path) -> bool:
        found = re.search(r"admin: (http://\S+)", log.read_text())
        if found:
            self._url = found[1]
        # An armed one may die before it says so, and is started again by whoever asks it next.
        return bool(found) or (self._admin is not None and self._admin.poll() is not None)

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        env = {key: value for key, value in os.environ.items() if not key.startswith("GRAFT_")}
        env |= {
            "PYTHONPATH": str(ROOT),
            "GRAFT_FAILPOINTS": str(self.armed),
            "GRAFT_ENGINE_POLL_S": "0.05",
            "GRAFT_ENGINE_SETTLE_S": "1",
            "GRAFT_ENGINE_PROBE_S": "5",
            "GRAFT_BLOB_BYTES": "4KiB",
        }
        with (self.folder / f"{name}{self._starts}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                env=env,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        (self.folder / f"{name}.pid").write_text(str(process.pid))
        return process

    def _engine_answers(self) -> bool:
        if self._engine is not None and self._engine.poll() is not None:
            return True  # killed by an armed admin before it could say a word
        try:
            return self.bridge("GET", "state").status_code == 200
        except httpx.TransportError:
            return False

    def bridge(self, method: str, name: str, json: object = None) -> httpx.Response:
        """Ask the engine itself."""
        url = f"http://127.0.0.1:{self.engine_port}{PREFIX}/{name}"
        return httpx.request(
            method, url, json=json, headers={"authorization": "Bearer between-us"}, timeout=10
        )

    def ask(self, method: str, path: str, key: str | None = None, **body: object) -> httpx.Response | None:
        """The admin's answer; none if it died over it."""
        headers = {"idempotency-key": key} if key else {}
        if "content" in body:
            headers |= OCTETS
        try:
            return httpx.request(method, self._url + path, headers=headers, timeout=PATIENCE_S, **body)  # type: ignore[arg-type]
        except httpx.TransportError:
            return None

    def arm(self, point: str, victim: str) -> None:
        """Have `victim` die when anybody comes to `point`."""
        me, other = ("engine", "admin") if point.startswith("engine.") else ("admin", "engine")
        pid = self.folder / f"{other}.pid"
        words = {me: "kill", other: f"kill {pid}", "both": f"kill {pid} self"}
        draft = self.armed.with_name("draft")
        draft.write_text(words[victim])
        draft.rename(self.armed / point)

    def disarm(self) -> bool:
        """Nobody dies any more; whether nobody did."""
        left = list(self.armed.iterdir())
        for path in left:
            path.unlink()
        return bool(left)

    def wait_for_death(self, point: str) -> bool:
        """Whether the point was reached in time."""
        until = time.monotonic() + 3
        while time.monotonic() < until:
            if not (self.armed / point).exists():
                time.sleep(0.05)
                return True
            time.sleep(0.01)
        return False

    def kill(self, who: str) -> None:
        """End one of the two at once."""
        process = self._admin if who == "admin" else self._engine
        assert process
        process.send_signal(signal.SIGKILL)
        process.wait()

    def revive(self) -> list[str]:
        """Start again who is dead; who that was."""
        assert self._admin and self._engine
        self._starts += 1
        dead = []
        if self._engine.poll() is not None:
            dead.append("engine")
            self.start_engine()
        if self._admin.poll() is not None:
            dead.append("admin")
            self.start_admin()
        return dead

    def wait_ready(self) -> str:
        """The version, once the service is ready; an engine of unknown state is replaced meanwhile."""
        until = time.monotonic() + PATIENCE_S
        said = "nothing"
        while time.monotonic() < until:
            self.revive()  # a death can come a little after whoever was armed with it went on
            answer = self.ask("GET", "/health/ready")
            if answer is None:
                continue
            if answer.status_code == 200:
                return str(answer.json()["version"])
            said = answer.text
            if answer.json()["code"] == "state_unknown":
                self.kill("engine")
                self.revive()
            time.sleep(0.02)
        raise Lost(f"not ready: {said}")

    def close(self) -> None:
        """End both."""
        for process in (self._admin, self._engine):
            if process and process.poll() is None:
                process.kill()
                process.wait()

    def _wait(self, condition: object, why: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if condition():  # type: ignore[operator]
                return
            time.sleep(0.02)
        raise Lost(why)
