"""The vLLM server as a child: how it is started, followed, and ended within a bound."""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.processes import ProcessRecord
from app.supported import InstalledVllm
from schemas.bridge import PREFIX

ENTRY = "vllm.entrypoints.launchers.api_server.entry"
EXTENSION = "loaders.engine.worker.GraftWorker"
PLUGIN = "graft"
SECRET_VARIABLE = "GRAFT_ENGINE_SECRET_FILE"  # noqa: S105 - the name of a variable
QUIET_ROUTES = f"{PREFIX}/state,/health"
"""Asked every second; in vLLM's access log they would bury everything else."""
OWNED_FLAGS = ("--model", "--host", "--port", "--worker-extension-cls")
"""vLLM's flags that Graft sets itself."""
_CONFIGS = ("config.json", "params.json")
"""What vLLM reads a model's shape from: Hugging Face's, Mistral's own."""
_PATH = re.compile(r"/|~|\.\.?(/|$)|[^/:]+/[^/]*/")
"""What can be a path alone: names that vLLM looks up are `name` or `org/name`, or URLs of a storage."""

_log = logging.getLogger(__name__)

_LOOK_S = 0.2
"""How often to see whether an engine that is not our child still runs."""


class EngineStartError(Exception):
    """The engine cannot be started as asked; the text says why."""


@dataclass(frozen=True)
class EngineCommand:
    """What to run, in which environment, and where its output goes."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path


@dataclass(frozen=True)
class ManagedEngine:
    """The engine to start: what the user called the model, where it listens, how it is run."""

    model: str
    host: str
    port: int
    secret_file: Path
    record: Path
    """Where the running engine is written down, for an admin that comes after this one."""
    command: EngineCommand


def engine_command(
    model: str,
    *,
    host: str,
    port: int,
    vllm_args: Sequence[str],
    secret_file: Path,
    log: Path,
    vllm: InstalledVllm,
    environ: Mapping[str, str],
) -> EngineCommand:
    """The command line and environment that make a vLLM server Graft's engine.

    Raises EngineStartError if `vllm_args` set what Graft sets, or if `model` is a path to no checkpoint.
    """
    flags = [argument.partition("=")[0].replace("_", "-") for argument in vllm_args]
    for flag in flags:
        if flag in OWNED_FLAGS:
            raise EngineStartError(f"{flag} is set by Graft: use the options of `graft serve` instead")
    _check_model(model, config_elsewhere="--hf-config-path" in flags)
    # -P: folders named like Graft's modules in the user's working folder are not looked at.
    argv = [sys.executable, "-P", "-m", ENTRY, "--model", model, "--served-model-name", model]
    argv += ["--host", host, "--port", str(port), "--worker-extension-cls", EXTENSION]
    argv += ["--disable-access-log-for-endpoints", QUIET_ROUTES]
    if "--enforce-eager" not in vllm_args and not _compiler(environ):
        argv.append("--enforce-eager")
    return EngineCommand((*argv, *vllm_args), _environment(environ, secret_file, vllm), log)


def _check_model(model: str, config_elsewhere: bool) -> None:
    """What vLLM would find out only after half a minute. Names without a folder are vLLM's to look up.

    Raises EngineStartError.
    """
    folder = Path(model)
    if not folder.is_dir():
        if _PATH.match(model):
            raise EngineStartError(
                f"there is no folder {model}: give a checkpoint's, or a name that vLLM knows"
            )
    elif not (config_elsewhere or any((folder / name).exists() for name in _CONFIGS)):
        raise EngineStartError(f"{model} is no checkpoint folder: it has no {' or '.join(_CONFIGS)}")


def _compiler(environ: Mapping[str, str]) -> str | None:
    """The C++ compiler that torch.compile would use, if there is one."""
    names = [name for name in (environ.get("CXX"), "g++", "c++") if name]
    found = (shutil.which(name, path=environ.get("PATH")) for name in names)
    return next((path for path in found if path), None)


def _environment(environ: Mapping[str, str], secret_file: Path, vllm: InstalledVllm) -> dict[str, str]:
    env = dict(environ)
    plugins = [name for name in env.get("VLLM_PLUGINS", "").split(",") if name]
    env["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*plugins, PLUGIN]))
    env[SECRET_VARIABLE] = str(secret_file)
    # It would open routes that change weights to all who reach the inference port.
    env.pop("VLLM_SERVER_DEV_MODE", None)
    # The admin's token is not the engine's business.
    env.pop("GRAFT_TOKEN", None)
    if vllm.cpu:
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return env


def make_secret(path: Path) -> None:
    """Put a new random secret into `path`, readable by this user alone."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(32))


class Supervisor:
    """The engine as a process group of its own: started, or taken over from an admin that was killed.

    `record` is the file in which a running engine is written down.
    """

    def __init__(self, command: EngineCommand, record: Path) -> None:
        self._command = command
        self._record = record
        self._child: asyncio.subprocess.Process | None = None
        self._known: ProcessRecord | None = None
        self._stopped = False

    def adopt(self) -> bool:
        """Take over the engine that an earlier admin left running with the same command.

        One with another command is ended by the next `stop`.
        """
        found = ProcessRecord.read(self._record)
        if found is None or not found.alive:
            return False
        self._known = found
        return found.argv == self._command.argv

    async def start(self) -> None:
        """Start the child with its output going to the log file, which is begun anew."""
        self._known, self._stopped = None, False
        with self._command.log.open("wb") as log:
            self._child = await asyncio.create_subprocess_exec(
                *self._command.argv,
                env=self._command.env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in a terminal reaches Graft alone, which then ends the engine in order.
                start_new_session=True,
            )
        try:
            self._known = ProcessRecord.of(self._child.pid, self._command.argv)
            await asyncio.to_thread(self._known.write, self._record)
        except ProcessLookupError:
            pass  # it ended at once, which `wait` will tell
        except OSError:
            _log.exception("if this service is killed, its engine will have to be ended by hand")

    @property
    def running(self) -> bool:
        """Whether there is an engine that has not been stopped."""
        return not self._stopped and (self._child is not None or self._known is not None)

    @property
    def pid(self) -> int:
        """Process id of the engine, which is also the id of its group."""
        if self._child is not None:
            return self._child.pid
        if self._known is None:
            raise RuntimeError("the engine was not started")
        return self._known.pid

    async def wait(self) -> int | None:
        """Exit status of the engine once it has ended; none if it was not our child."""
        if self._child is not None:
            return await self._child.wait()
        while self._known is not None and self._known.alive:  # noqa: ASYNC110 - nobody tells us
            await asyncio.sleep(_LOOK_S)
        return None

    async def stop(self, grace_s: float) -> None:
        """End the whole group: SIGTERM, and SIGKILL to whoever is left after `grace_s` seconds.

        Does nothing if there is no engine.
        """
        if not self.running:
            return
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), grace_s)
        # Workers can outlive the API server, so this is right after its end too.
        self._signal(signal.SIGKILL)
        await self.wait()
        self._stopped = True
        await asyncio.to_thread(self._record.unlink, missing_ok=True)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
