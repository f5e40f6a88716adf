"""A vLLM server with Graft beside it, started as a user does who attaches one to the other.

vLLM's own routes for changing weights are open here (`VLLM_SERVER_DEV_MODE`), since they are what is
compared with: on an engine that Graft starts they are closed.
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

_PIECE = 1 << 20
_START_S = 300.0
_STOP_S = 60.0
_SCHEDULER = "VLLM::EngineCor"
"""What vLLM's scheduler calls its process, as far as the kernel keeps it."""
SAFETENSORS = {"content-type": "application/vnd.safetensors"}


def serving_cores() -> list[int]:
    """The half of the machine that computes; the other one is left to HTTP, uploads and measuring."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[: max(1, len(cores) // 2)]


class Service:
    """Both processes, their addresses, and what is asked of them."""

    def __init__(self, model: Path, folder: Path, max_model_len: int = 8192) -> None:
        self.model = model
        self._folder = folder
        self._max_model_len = max_model_len
        self._children: list[subprocess.Popen[bytes]] = []
        self.admin, self.inference = (f"http://127.0.0.1:{_free_port()}" for _ in range(2))
        self.http = httpx.Client(timeout=600)

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        secret = self._folder / "secret"
        secret.write_text(secrets.token_urlsafe(32))
        secret.chmod(0o600)
        try:
            self._start_engine(secret)
            self._start_admin(secret)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _start_engine(self, secret: Path) -> None:
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"),
            *("--model", str(self.model), "--host", "127.0.0.1", "--port", self.inference.rpartition(":")[2]),
            *("--worker-extension-cls", "benchmarks.bare_worker.BareWorker", "--enforce-eager"),
            *("--max-model-len", str(self._max_model_len)),
        ]
        variables = {
            "GRAFT_ENGINE_SECRET_FILE": str(secret),
            "GRAFT_SHARD_DIR": str(self._folder),
            "VLLM_PLUGINS": "graft",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in serving_cores()),
        }
        engine = self._start("engine.log", command, variables)
        self._await(f"{self.inference}/health")
        _keep_on(engine.pid, serving_cores())

    def _start_admin(self, secret: Path) -> None:
        command = [
            *(sys.executable, "-m", "app.cli", "serve", "--engine", self.inference),
            *("--engine-secret-file", str(secret), "--port", self.admin.rpartition(":")[2]),
            *("--state-dir", str(self._folder / "state")),
        ]
        self._start("admin.log", command, {"GRAFT_UNDO_BYTES": "2GiB"})
        self._await(f"{self.admin}/health/ready")

    def _start(self, log: str, command: list[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self._folder / log).open("wb") as file:
            child = subprocess.Popen(
                command,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children.append(child)
        return child

    def _await(self, url: str) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if any(child.poll() is not None for child in self._children):
                break
            with contextlib.suppress(httpx.TransportError):
                if self.http.get(url).status_code == httpx.codes.OK:
                    return
            time.sleep(0.25)
        logs = "".join(path.read_text(errors="replace")[-3000:] for path in self._folder.glob("*.log"))
        raise RuntimeError(f"{url} does not answer:\n{logs}")

    def _stop(self) -> None:
        for child in reversed(self._children):
            child.terminate()
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_STOP_S)
            with contextlib.suppress(ProcessLookupError):  # workers can outlive the server
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        self.http.close()

    # -- Graft -----------------------------------------------------------------------

    def ask(self, method: str, path: str, **options: Any) -> Any:
        """A call to the admin. Raises RuntimeError if it is refused."""
        answer = self.http.request(method, self.admin + path, **options)
        if not answer.is_success:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text}")
        return answer.json() if answer.content else None

    def version(self) -> str:
        """The current one."""
        version: str = self.ask("GET", "/v1/versions/current")["version"]
        return version

    def digests(self) -> dict[str, str]:
        """Of every runtime tensor of every rank."""
        answer = self.ask("GET", "/v1/digests")
        return {
            f"{rank['rank']}:{one['name']}": one["blake3"]
            for rank in answer["ranks"]
            for one in rank["tensors"]
        }

    def prepared(self, path: str, body: bytes, in_flight: str = "keep") -> str:
        """A transaction with one upload to `path` below it, ready to be committed; the route to it."""
        method = "POST" if path == "patches" else "PUT"
        made = f"/v1/transactions/{self.ask('POST', '/v1/transactions', json={'in_flight': in_flight})['id']}"
        headers = SAFETENSORS | {"content-length": str(len(body))}
        self.ask(method, f"{made}/{path}", content=_pieces(body), headers=headers)
        self.ask("POST", f"{made}/prepare")
        return made

    def commit(self, transaction: str) -> dict[str, Any]:
        """The receipt."""
        receipt: dict[str, Any] = self.ask("POST", f"{transaction}/commit")
        return receipt

    def rollback(self, version: str, in_flight: str = "keep") -> dict[str, Any]:
        """The receipt."""
        wanted = {"to_version": version, "in_flight": in_flight}
        receipt: dict[str, Any] = self.ask("POST", "/v1/rollback", json=wanted)
        return receipt

    # -- vLLM ------------------------------------------------------------------------

    def rpc(self, method: str, *arguments: str, **named: str) -> list[Any]:
        """vLLM's `collective_rpc` by its own route."""
        wanted = {"method": method, "args": arguments, "kwargs": named}
        answer = self.http.post(f"{self.inference}/collective_rpc", json=wanted).raise_for_status()
        results: list[Any] = answer.json()["results"] if answer.content else []
        return results

    def nothing(self) -> None:
        """The least that vLLM's server answers."""
        self.http.get(f"{self.inference}/ping").raise_for_status()

    def vllm_reload(self, folder: Path) -> None:
        """vLLM's own way to other weights: pause, reload all of them from a checkpoint folder, resume."""
        self.http.post(f"{self.inference}/pause", params={"mode": "keep"}).raise_for_status()
        try:
            self.rpc("reload_weights", weights_path=str(folder))
        finally:
            self.http.post(f"{self.inference}/resume").raise_for_status()

    def answer(self, prompt: list[int], tokens: int = 24) -> str:
        """A greedy completion with nothing cached."""
        self.http.post(f"{self.inference}/reset_prefix_cache").raise_for_status()
        body = {"model": str(self.model), "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        made = self.http.post(f"{self.inference}/v1/completions", json=body | {"ignore_eos": True})
        text: str = made.raise_for_status().json()["choices"][0]["text"]
        return text


def _pieces(body: bytes) -> Iterator[bytes]:
    """The body in pieces: httpx copies what is left of one after everything that the socket takes of it."""
    for at in range(0, len(body), _PIECE):
        yield body[at : at + _PIECE]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _keep_on(group: int, cores: list[int]) -> None:
    """Keep vLLM's scheduler on the cores of its worker.

    It spins while it waits for the worker; on a core that it shares with them, servers and clients were
    seen to wait for seconds.
    """
    for process in (path for path in Path("/proc").iterdir() if path.name.isdigit()):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if os.getpgid(int(process.name)) != group:
                continue
            if not (process / "comm").read_text().startswith(_SCHEDULER):
                continue
            for thread in (process / "task").iterdir():
                os.sched_setaffinity(int(thread.name), cores)
