"""A running stack for tests: `graft serve` on a model, its engine, and what a client does with them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

START_S = 300
STOP_S = 60
SAFETENSORS = {"content-type": "application/vnd.safetensors"}
Answer = tuple[str, tuple[float, ...], tuple[tuple[str, ...], ...]]
"""Text, log-probabilities of its tokens, and the nearest tokens at each step."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Wait for `condition`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


@dataclass
class Stack:
    """One `graft serve` process with its engine."""

    model: Path
    folder: Path
    cores: str = "0"
    """CPU cores of the ranks, `|` between them; engines on the same cores wait for each other."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of the environment, beside those that every stack has."""
    parallel: str = "tensor"
    """How the ranks share the work: `tensor` or `data` parallel."""
    admin: str = ""
    inference: str = ""
    process: subprocess.Popen[bytes] | None = None
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=300))

    @property
    def ranks(self) -> int:
        return len(self.cores.split("|"))

    @property
    def failpoints(self) -> Path:
        return self.folder / "failpoints"

    @property
    def log(self) -> str:
        return (self.folder / "serve.log").read_text(errors="replace")

    def start(self, max_model_len: int = 1024) -> None:
        """Start and wait until the admin says that it is ready."""
        self.failpoints.mkdir(parents=True, exist_ok=True)
        self.admin = f"http://127.0.0.1:{free_port()}"
        self.inference = f"http://127.0.0.1:{free_port()}"
        self._run(max_model_len)

    def _run(self, max_model_len: int = 1024) -> None:
        command = [
            str(Path(sys.executable).parent / "graft"),
            *("serve", str(self.model)),
            *("--port", self.admin.rpartition(":")[2], "--engine-port", self.inference.rpartition(":")[2]),
            *("--state-dir", str(self.folder / "state")),
            *("--", "--enforce-eager", "--enable-scale-out", "--max-model-len", str(max_model_len)),
            *(f"--{self.parallel}-parallel-size", str(self.ranks)),
        ]
        environment = os.environ | {
            "GRAFT_FAILPOINTS": str(self.failpoints),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": self.cores,
            "GRAFT_UNDO_BYTES": "3GiB",
            **self.variables,
        }
        with (self.folder / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        self._await_ready()
        if self.ranks == 1:
            self._leave_a_core()

    def _leave_a_core(self) -> None:
        """Keep vLLM's scheduler on the core of its worker.

        It spins for every answer of the worker; on a core that it shares with them, admin, API server and
        test were seen to wait for seconds, as long as the engine generates.
        """
        for scheduler in self.processes("VLLM::EngineCor"):
            for thread in Path(f"/proc/{scheduler}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {int(self.cores)})

    def processes(self, name: str) -> list[int]:
        """Ids of the engine's processes that call themselves so."""
        group = json.loads((self.folder / "state" / "engine.json").read_text())["pid"]
        found = []
        for process in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
            try:
                ours = os.getpgid(process) == group
                comm = Path(f"/proc/{process}/comm").read_text()
            except (ProcessLookupError, FileNotFoundError):
                continue
            if ours and comm.startswith(name):
                found.append(process)
        return sorted(found)

    def _await_ready(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"graft serve ended with {self.process.returncode}:\n{self.log}")
            try:
                if self.http.get(f"{self.admin}/health/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        raise RuntimeError(f"not ready after {START_S} s:\n{self.log}")

    def kill_admin(self) -> None:
        """End the admin as a crash would; its engine goes on."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Start it again on the same state folder and addresses, and wait until it is ready."""
        self._run()

    def stop(self) -> int:
        """Ask it to end, and give its exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        finally:
            self.http.close()
            if self.process.poll() is None:
                self.process.kill()

    # -- inference -------------------------------------------------------------------

    def complete(self, prompt: list[int] | str, tokens: int = 24) -> Answer:
        """A greedy completion with log-probabilities."""
        body = self._completion(prompt, tokens) | {"logprobs": 3}
        answer = self.http.post(f"{self.inference}/v1/completions", json=body).raise_for_status().json()
        choice = answer["choices"][0]
        logprobs = choice["logprobs"]
        nearest = tuple(tuple(sorted(step)) for step in logprobs["top_logprobs"])
        return choice["text"], tuple(logprobs["token_logprobs"]), nearest

    def _completion(self, prompt: list[int] | str, tokens: int) -> dict[str, Any]:
        return {
            "model": str(self.model),
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }

    def stream(self, prompt: list[int], tokens: int) -> Iterator[str]:
        """Pieces of a greedy completion as they come; then its finish reason, and its tokens as counted."""
        body = self._completion(prompt, tokens) | {
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with httpx.stream("POST", f"{self.inference}/v1/completions", json=body, timeout=300) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if not chunk["choices"]:
                    yield str(chunk["usage"]["completion_tokens"])
                    continue
                choice = chunk["choices"][0]
                yield choice["text"]
                if choice["finish_reason"]:
                    yield choice["finish_reason"]

    def ask(self, question: str, tokens: int = 32) -> str:
        """A greedy chat answer."""
        body = {
            "model": str(self.model),
            "messages": [{"role": "user", "content": question}],
            "max_tokens": tokens,
            "temperature": 0,
        }
        answer = self.http.post(f"{self.inference}/v1/chat/completions", json=body).raise_for_status()
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    def stamped_version(self, prompt: list[int]) -> set[str]:
        """The weight versions that a completion carries, from vLLM's token-in-token-out route."""
        body = {"token_ids": prompt, "sampling_params": {"max_tokens": 4, "temperature": 0}}
        answer = self.http.post(f"{self.inference}/inference/v1/generate", json=body).raise_for_status()
        return {span["version"] for span in answer.json()["choices"][0]["weight_versions"]}

    # -- admin -----------------------------------------------------------------------

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self.http.request(method, self.admin + path, **options)

    def json(self, method: str, path: str, **options: Any) -> Any:
        answer = self.call(method, path, **options)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def patch(self, body: bytes, **query: Any) -> dict[str, Any]:
        """Commit a batch or plain file in one request."""
        receipt: dict[str, Any] = self.json(
            "POST", "/v1/patches", content=body, headers=SAFETENSORS, params=query
        )
        return receipt

    def put_expert(self, layer: int, expert: int, body: bytes, **query: Any) -> dict[str, Any]:
        """Commit one expert in one request."""
        path = f"/v1/experts/{layer}/{expert}"
        receipt: dict[str, Any] = self.json("PUT", path, content=body, headers=SAFETENSORS, params=query)
        return receipt

    def rollback(self, version: int | str) -> dict[str, Any]:
        receipt: dict[str, Any] = self.json("POST", "/v1/rollback", json={"to_version": version})
        return receipt

    def version(self) -> int:
        return int(self.json("GET", "/v1/versions/current")["version"])

    def digests(self) -> dict[str, str]:
        """Every rank's digests by rank and name."""
        answer = self.json("GET", "/v1/digests")
        return {
            f"{rank['rank']}:{tensor['name']}": tensor["blake3"]
            for rank in answer["ranks"]
            for tensor in rank["tensors"]
        }

    def arm(self, failpoint: str, what: str = "") -> None:
        """Have a failpoint of a worker fire once: it fails, or does `what`."""
        (self.folder / "armed").write_text(what)
        (self.folder / "armed").rename(self.failpoints / failpoint)

    def export(self, version: int, path: Path) -> None:
        """Write a version's weights as a checkpoint folder."""
        begun = self.call("POST", f"/v1/versions/{version}/export", json={"path": str(path)})
        assert begun.status_code == 202, begun.text
        where = begun.headers["location"]
        until(lambda: self.json("GET", where)["state"] != "running")
        assert self.json("GET", where)["state"] == "done"

    def staged_files(self) -> list[Path]:
        return [path for path in (self.folder / "state" / "staged").rglob("*") if path.is_file()]

    @contextmanager
    def transaction(self, **options: Any) -> Iterator["Transaction"]:
        """An open transaction; what happens to it is up to the caller."""
        answer = self.json("POST", "/v1/transactions", json=options)
        yield Transaction(self, answer["id"])


@dataclass
class Transaction:
    """One transaction of a stack."""

    stack: Stack
    id: str

    def expert(self, layer: int, expert: int, body: bytes) -> Any:
        path = f"/v1/transactions/{self.id}/experts/{layer}/{expert}"
        return self.stack.json("PUT", path, content=body, headers=SAFETENSORS)

    def patches(self, body: bytes) -> Any:
        path = f"/v1/transactions/{self.id}/patches"
        return self.stack.json("POST", path, content=body, headers=SAFETENSORS)

    def commit(self) -> httpx.Response:
        return self.stack.call("POST", f"/v1/transactions/{self.id}/commit")
