"""A real admin process before an engine process: started, armed, killed, started again."""

import os
import re
import shutil
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from app.listen import listen
from schemas.bridge import PREFIX
from tests.crash.model import State
from tests.crash.processes import Forked, Process
from tests.fakes.admin import OCTETS


class Lost(Exception):
    """Something that was acknowledged is not there, or does not come back."""


class Rig(ABC):
    """Both processes, and clients of both, over one state folder. Kinds of engines derive from it."""

    admin_env: Mapping[str, str]
    """Settings of the admin that suit the engine."""
    patience_s = 180.0
    death_s = 3.0
    """How long it can take until a point is reached, once everybody answers."""
    doubt_s = 1.0
    """After how long an engine is believed to be of unknown state."""
    numbers: Iterator[int]
    """Names of experts to upload."""
    checkpoints: Iterator[int]
    """Names of checkpoints to reload."""
    rehearsal: list[State] = []  # noqa: RUF012 - nobody changes it
    """States to go through in peace first, since nothing else says what they look like."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.armed = folder / "failpoints"
        self.armed.mkdir(parents=True)
        self.secret = folder / "secret"
        self.secret.write_text("between-us")
        with listen("127.0.0.1", 0) as probe:
            self.engine_port: int = probe.getsockname()[1]
        self._admin: Process | None = None
        self._engine: Process | None = None
        self._url = ""
        self._starts = 0

    # -- what kinds of engines differ in ------------------------------------------------

    @abstractmethod
    def launch_engine(self, log: Path) -> Process:
        """An engine on its first checkpoint."""

    @abstractmethod
    def expert(self, number: int) -> bytes:
        """A body with expert 0 of layer 0."""

    @abstractmethod
    def checkpoint(self, number: int) -> Path:
        """A folder to reload."""

    @abstractmethod
    def require_weights(self, state: State, version: int) -> None:
        """Raises Lost unless every rank has just these weights."""

    def learn(self, state: State) -> None:  # noqa: B027 - for whoever has a rehearsal
        """The engine is in this state of the rehearsal."""

    # -- processes ----------------------------------------------------------------------

    def start(self) -> None:
        """Start both."""
        self.start_engine()
        self.start_admin()

    def start_engine(self) -> None:
        """Start an engine at the base, and wait until it answers."""
        self._engine = self.launch_engine(self.folder / f"engine{self._starts}.log")
        self._name("engine", self._engine)
        self._wait(self._engine_answers, "the engine does not come up")

    def start_admin(self) -> None:
        """Start an admin on an old port or a new one, and wait until it answers."""
        arguments = ["serve", "--port", "0", "--state-dir", str(self.folder / "state")]
        arguments += ["--engine", f"http://127.0.0.1:{self.engine_port}"]
        arguments += ["--engine-secret-file", str(self.secret)]
        log = self.folder / f"admin{self._starts}.log"
        self._admin = Forked("app.cli", arguments, self.failpoints | self.admin_env, log)
        self._name("admin", self._admin)
        self._wait(lambda: self._said(log), "the admin does not come up")

    def _name(self, who: str, process: Process) -> None:
        """Where failpoints of the other one find it."""
        (self.folder / f"{who}.pid").write_text(str(process.target))

    @property
    def failpoints(self) -> dict[str, str]:
        """The variable that turns them on."""
        return {"GRAFT_FAILPOINTS": str(self.armed)}

    def _said(self, log: Path) -> bool:
        found = re.search(r"admin: (http://\S+)", log.read_text()) if log.exists() else None
        if found:
            self._url = found[1]
        # An armed one may die before it says so, and is started again by whoever asks it next.
        return bool(found) or (self._admin is not None and not self._admin.alive)

    def _engine_answers(self) -> bool:
        if self._engine is not None and not self._engine.alive:
            return True  # killed by an armed admin before it could say a word
        try:
            return self.bridge("GET", "state").status_code == 200
        except httpx.TransportError:
            return False

    def kill(self, who: str) -> None:
        """End one of the two at once."""
        process = self._admin if who == "admin" else self._engine
        assert process
        process.kill()

    def revive(self) -> list[str]:
        """Start again who is dead; who that was."""
        assert self._admin and self._engine
        self._starts += 1
        dead = []
        if not self._engine.alive:
            dead.append("engine")
            self.start_engine()
        if not self._admin.alive:
            dead.append("admin")
            self.start_admin()
        return dead

    def admin_status(self) -> int | None:
        """With what the admin has ended, if it has."""
        assert isinstance(self._admin, Forked)
        return self._admin.status

    def forget_everything(self) -> None:
        """End both, and remove the state folder."""
        self.kill("admin")
        self.kill("engine")
        shutil.rmtree(self.folder / "state")

    def wait_ready(self) -> str:
        """The version, once the service is ready; an engine of unknown state is replaced meanwhile."""
        until = time.monotonic() + self.patience_s
        said = "nothing"
        unknown_since = time.monotonic()
        while time.monotonic() < until:
            if self.revive():  # a death can come a little after whoever was armed with it went on
                unknown_since = time.monotonic()
            answer = self.ask("GET", "/health/ready")
            if answer is None:
                continue
            if answer.status_code == 200:
                return str(answer.json()["version"])
            said = answer.text
            if answer.json()["code"] != "state_unknown":
                unknown_since = time.monotonic()
            elif time.monotonic() - unknown_since > self.doubt_s:  # else it may be said of the one before
                self.kill("engine")
            time.sleep(0.02)
        raise Lost(f"not ready: {said}")

    def close(self) -> None:
        """End both."""
        for process in (self._admin, self._engine):
            if process:
                process.kill()

    # -- questions ------------------------------------------------------------------------

    def bridge(self, method: str, name: str, json: object = None) -> httpx.Response:
        """Ask the engine itself."""
        url = f"http://127.0.0.1:{self.engine_port}{PREFIX}/{name}"
        return httpx.request(
            method, url, json=json, headers={"authorization": "Bearer between-us"}, timeout=10
        )

    def engine_digests(self) -> list[dict[str, str]]:
        """By rank: the digest of every tensor."""
        ranks = self.bridge("POST", "digests", {"nonce": "0" * 32}).raise_for_status().json()["ranks"]
        return [{one["name"]: one["blake3"] for one in rank["tensors"]} for rank in ranks]

    def ask(self, method: str, path: str, key: str | None = None, **body: Any) -> httpx.Response | None:
        """The admin's answer; none if it died over it."""
        headers = {"idempotency-key": key} if key else {}
        if "content" in body:
            headers |= OCTETS
        try:
            return httpx.request(method, self._url + path, headers=headers, timeout=self.patience_s, **body)
        except httpx.TransportError:
            return None

    @staticmethod
    def require(condition: bool, why: str) -> None:
        """Raises Lost."""
        if not condition:
            raise Lost(why)

    # -- deaths ---------------------------------------------------------------------------

    def arm(self, point: str, victim: str) -> None:
        """Have `victim` die when anybody comes to `point`; `soon.20` comes by itself after 20 ms."""
        if point.startswith("soon."):
            self._arm_timer(point, victim)
            return
        me, other = ("engine", "admin") if point.startswith("engine.") else ("admin", "engine")
        pid = self.folder / f"{other}.pid"
        words = {me: "kill", other: f"kill {pid}", "both": f"kill {pid} self"}
        draft = self.armed.with_name("draft")
        draft.write_text(words[victim])
        draft.rename(self.armed / point)

    def _arm_timer(self, point: str, victim: str) -> None:
        armed = self.armed / point
        armed.touch()

        def end() -> None:
            for who in ("engine", "admin"):
                if victim in (who, "both"):
                    os.kill(int((self.folder / f"{who}.pid").read_text()), signal.SIGKILL)
            armed.unlink()

        threading.Timer(int(point.removeprefix("soon.")) / 1000, end).start()

    def disarm(self) -> bool:
        """Nobody dies any more; whether nobody did."""
        left = list(self.armed.iterdir())
        for path in left:
            path.unlink()
        return bool(left)

    def wait_for_death(self, point: str) -> bool:
        """Whether the point was reached in time."""
        until = time.monotonic() + self.death_s
        while time.monotonic() < until:
            if not (self.armed / point).exists():
                time.sleep(0.05)
                return True
            time.sleep(0.01)
        return False

    def _wait(self, condition: Callable[[], bool], why: str) -> None:
        until = time.monotonic() + self.patience_s
        while time.monotonic() < until:
            if condition():
                return
            time.sleep(0.02)
        raise Lost(why)
