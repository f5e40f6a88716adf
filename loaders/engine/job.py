"""Jobs: work that takes long runs in a thread, and hands what must run in the main thread to it.

A worker answers RPCs between two steps of the model, so an RPC must not take long.
It starts a job; later RPCs poll it, and each poll runs for a bounded while what the
job has queued for the main thread (whatever runs vLLM code).
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch

R = TypeVar("R")

_HAND_OVER_S = 0.0002


class Abandoned(Exception):
    """Nobody polls the job any more."""


@dataclass(slots=True)
class _Call:
    function: Callable[[], Any]
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.function()
        except BaseException as error:  # noqa: BLE001 - raised again in the job's thread
            self.error = error
        self.done.set()


class MainThread:
    """How a job reaches the worker's main thread."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._given_up = threading.Event()
        self._queue: SimpleQueue[_Call] = SimpleQueue()

    def call(self, function: Callable[[], R]) -> R:
        """Run `function` in the main thread, at a later poll, and return what it returns.

        Raises Abandoned if no poll comes in time, and what `function` raises.
        """
        self.check()
        call = _Call(function)
        self._queue.put(call)
        if not call.done.wait(self._patience_s):
            self._given_up.set()
            raise Abandoned(f"not polled for {self._patience_s} s")
        if call.error is not None:
            raise call.error
        result: R = call.result
        return result

    def check(self) -> None:
        """Raises Abandoned if nobody waits for the job any more."""
        if self._given_up.is_set():
            raise Abandoned("the job was given up")

    def give_up(self) -> None:
        """Let the job end at its next step without a result."""
        self._given_up.set()

    def serve(self, budget_s: float) -> bool:
        """Run queued calls until none is left or the time is used up; whether there were any."""
        until = time.perf_counter() + budget_s
        served = False
        while True:
            try:
                call = self._queue.get(timeout=0.001)
            except Empty:
                return served
            call.run()
            served = True
            if time.perf_counter() >= until:
                return served


def _hand_over_quickly() -> None:
    """Let threads that want Python's lock have it soon.

    A step of the model drops and takes it with every operation, and each time waits for as long as a job may
    keep it: with the usual 5 ms a job that computes in Python makes a step of 85 ms take 8 s (measured on two
    cores), with this 0.3 s.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _HAND_OVER_S))


def all_cores() -> set[int]:
    """Those that a thread of this process can be bound to: a container may allow a part of the machine's."""
    found: set[int] = set()

    def look() -> None:
        run_on(_every_core())
        found.update(own_cores())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found


def own_cores() -> set[int]:
    """Those on which this thread may run; all of them where that cannot be told."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _every_core()


def _every_core() -> set[int]:
    return set(range(os.cpu_count() or 1))


def run_on(cores: set[int]) -> None:
    """Let this thread run on these cores: vLLM binds a worker to the cores that it computes on."""
    try:
        os.sched_setaffinity(threading.get_native_id(), cores)
    except (AttributeError, OSError):
        # Not on Linux, or not allowed to: then it shares the worker's cores.
        return


class Job(Generic[R]):
    """One piece of work in a thread of its own."""

    def __init__(self, work: Callable[[MainThread], R], patience_s: float = 60.0) -> None:
        self._main = MainThread(patience_s)
        self._result: R | None = None
        self._error: Exception | None = None
        self.served = False
        """Whether the last poll ran something for the job, so that more may follow at once."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="graft-job", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[MainThread], R]) -> None:
        run_on(_every_core())
        _hand_over_quickly()
        try:
            with torch.no_grad():
                self._result = work(self._main)
        except Exception as error:  # noqa: BLE001 - raised again where the result is asked for
            self._error = error
        except BaseException as error:  # noqa: BLE001 - a job that exits has no result either
            self._error = RuntimeError(f"the job ended by {type(error).__name__}")

    def poll(self, budget_s: float = 0.005) -> bool:
        """Serve the job from the main thread for a while; whether it has ended."""
        self.served = self._thread.is_alive() and self._main.serve(budget_s)
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """Let the job end without a result; what it made is dropped."""
        self._main.give_up()

    def result(self) -> R:
        """What the ended job returned.

        Raises what it raised.
        """
        if self._error is not None:
            raise self._error
        result: R = self._result  # type: ignore[assignment]  # set when there was no error
        return result
