"""Completions that run while something happens to their engine, and when each of their tokens came.

They are read in a process of their own, so that an upload which is being sent delays no time stamp. The clock
of `time.perf_counter` is one for all processes.
"""

import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from statistics import median
from types import TracebackType
from typing import Any, Self

import httpx

_POLL_S = 0.05
_LONGEST_S = 120.0


@dataclass(frozen=True, slots=True)
class Course:
    """Seconds at which each stream had a chunk, with the tokens that it then had."""

    streams: tuple[tuple[tuple[float, int], ...], ...]

    def usual(self) -> float:
        """The median gap between tokens, in seconds."""
        return median(until - since for since, until in self._gaps())

    def longest(self, begun: float, ended: float) -> float:
        """The longest gap that lies in this span in part or as a whole, in seconds."""
        return max(until - since for since, until in self._gaps() if until > begun and since < ended)

    def rate(self, begun: float, ended: float) -> float:
        """Tokens per second of all streams in the span."""
        made = 0
        for stream in self.streams:
            inside = [tokens for at, tokens in stream if begun <= at < ended]
            made += inside[-1] - inside[0] if inside else 0
        return made / (ended - begun)

    def _gaps(self) -> list[tuple[float, float]]:
        return [(since, until) for stream in self.streams for (since, _), (until, _) in pairwise(stream)]


@dataclass(slots=True)
class Gap:
    """What one event did to the streams, in seconds."""

    longest: float
    """The longest gap while it lasted."""
    usual: float
    """The median gap of the same streams before, during and after."""
    seconds: float
    """How long it took whoever asked for it."""

    @property
    def stall(self) -> float:
        """For how long tokens were held up."""
        return self.longest - self.usual


class Streams:
    """So many greedy completions of one prompt at once, again and again."""

    def __init__(self, inference: str, model: str, prompt: list[int], count: int, tokens: int = 4000) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._orders, theirs = spawn.Pipe()
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        self._reader = spawn.Process(target=_serve, args=(f"{inference}/v1/completions", body, count, theirs))

    def __enter__(self) -> Self:
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._orders.send("leave")
        self._reader.join()

    def around(self, event: Callable[[], object], quiet: int = 25) -> Gap:
        """Start streams, have the event, and end them; `quiet` tokens of each before it and after it."""
        begun, ended, course = self.during(event, quiet)
        return Gap(course.longest(begun, ended), course.usual(), ended - begun)

    def during(self, event: Callable[[], object], quiet: int = 25) -> tuple[float, float, Course]:
        """When the event began and ended, and the course of the streams."""
        self._orders.send("begin")
        try:
            self._await(quiet)
            begun = time.perf_counter()
            event()
            ended = time.perf_counter()
            self._await(self._fewest() + quiet)
        finally:
            self._orders.send("end")
            course: Course = self._orders.recv()
        return begun, ended, course

    def _fewest(self) -> int:
        self._orders.send("count")
        count: int = self._orders.recv()
        return count

    def _await(self, tokens: int) -> None:
        deadline = time.monotonic() + _LONGEST_S
        while self._fewest() < tokens:
            if time.monotonic() > deadline:
                raise RuntimeError("the streams do not go on")
            time.sleep(_POLL_S)


@dataclass(slots=True)
class _Stream:
    """One completion, read in a thread."""

    url: str
    body: dict[str, Any]
    chunks: list[tuple[float, int]] = field(default_factory=list)
    ended: bool = False

    def run(self) -> None:
        with httpx.stream("POST", self.url, json=self.body, timeout=_LONGEST_S) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                now = time.perf_counter()
                if self.ended:
                    return
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if chunk["choices"]:
                        self.chunks.append((now, chunk["usage"]["completion_tokens"]))


def _serve(url: str, body: dict[str, Any], count: int, orders: Connection) -> None:
    """The reading process: does what it is told until it may leave."""
    streams: list[_Stream] = []
    threads: list[threading.Thread] = []
    while (order := orders.recv()) != "leave":
        if order == "begin":
            streams = [_Stream(url, body) for _ in range(count)]
            threads = [threading.Thread(target=stream.run, daemon=True) for stream in streams]
            for thread in threads:
                thread.start()
        elif order == "count":
            orders.send(min((stream.chunks[-1][1] if stream.chunks else 0) for stream in streams))
        else:
            for stream in streams:
                stream.ended = True
            for thread in threads:
                thread.join()
            orders.send(Course(tuple(tuple(stream.chunks) for stream in streams)))
