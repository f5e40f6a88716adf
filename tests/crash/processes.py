"""Processes to kill: ours, forked from one that has imported their modules, and whatever else."""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["app.commands.graft", "app.main", "app.serve", "tests.fakes.engine"])


class Process(ABC):
    """Something that runs, and can be ended at once."""

    target: int
    """What to send a signal to: it, or its process group as a negative number."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it still runs."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once, and wait for its end."""


class Forked(Process):
    """A module's `main`, without the second that its imports take."""

    def __init__(self, module: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._process = _FORKED.Process(target=_main, args=(module, argv, env, log), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.target = self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.is_alive()

    @property
    def status(self) -> int | None:
        """With what it has ended, if it has."""
        return self._process.exitcode

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.join()


class Spawned(Process):
    """Python with any arguments, in a process group of its own."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, *argv],
                env=os.environ | env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.target = -self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the leader still runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the whole group at once; if its leader is gone, what is left of it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _main(module: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(env)
    sys.argv = [module, *argv]
    importlib.import_module(module).main()
