"""Timing in turns: what is compared runs alternately, so that what disturbs one side disturbs all."""

import time
from collections.abc import Callable, Mapping
from statistics import median


def in_turns(
    sides: Mapping[str, Callable[[], object]], rounds: int, before: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of every side in `rounds` rounds; `before` each runs what is not timed."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            before()
            taken[name].append(seconds(run))
    return taken


def seconds(run: Callable[[], object]) -> float:
    """How long a call takes."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def spread(taken: list[float]) -> str:
    """Median and range, for people."""
    return f"{shown(median(taken))} ({shown(min(taken))} to {shown(max(taken))}, {len(taken)} times)"


def shown(seconds: float) -> str:
    """A duration in a handy unit."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
