"""Hands: the threads that write moves, side by side.

Single elements all over a large memory are waited for one by one: two threads take half the time that
one does. While nothing is served there are idle cores for them.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from loaders.engine.job import all_cores, own_cores, run_on
from loaders.engine.move import Move, storage_of

_MOST = 3
"""Threads beside the one that asks; memory is no faster with more."""
_WORTH = 1 << 20
"""Bytes of moves for which threads are woken."""
_PART = 1 << 19
"""Bytes of a move that are written at a time, so that all threads end at about the same time."""


class Hands:
    """Writes moves whose targets are in the memory of the CPU; those on a GPU follow one after the other."""

    def __init__(self) -> None:
        """Made in the thread that will write: it takes its part, and the others keep off its core."""
        here = own_cores()
        cores = all_cores() - here or here
        self._count = min(_MOST, len(cores) if cores is not here else len(here) - 1)
        self._pool = ThreadPoolExecutor(max(1, self._count), "graft-hand", lambda: run_on(cores))

    def write(self, moves: Sequence[Move], targets: Mapping[str, torch.Tensor]) -> None:
        """Write all of them; where some may meet, which is in one memory, in their order.

        Raises what a write that failed raised, once nothing is being written any more.
        """
        tasks = self._tasks(moves, targets)
        queue = deque(tasks)
        others: list[Future[None]] = []
        try:
            for _ in range(min(self._count, len(tasks) - 1)):
                others.append(self._pool.submit(_work, queue, targets))
            _work(queue, targets)
        finally:
            queue.clear()  # also of what a thread would take that was asked for, but could not be started
            wait(others)
        for other in others:
            other.result()

    def _tasks(self, moves: Sequence[Move], targets: Mapping[str, torch.Tensor]) -> list[list[Move]]:
        """What can be done side by side, the longest first; a single task if that is not worth the while."""
        used = [targets[move.target] for move in moves]
        if sum(move.nbytes for move in moves) < _WORTH or any(one.device.type != "cpu" for one in used):
            return [list(moves)]
        groups: dict[int, list[Move]] = defaultdict(list)
        for move, target in zip(moves, used, strict=True):
            groups[storage_of(target)].append(move)
        tasks: list[list[Move]] = []
        for group in groups.values():
            tasks += [[part] for part in group[0].parts(_PART)] if len(group) == 1 else [group]
        return sorted(tasks, key=lambda task: -sum(move.nbytes for move in task))


def _work(queue: deque[list[Move]], targets: Mapping[str, torch.Tensor]) -> None:
    """Take tasks until none is left, or one has failed in any thread."""
    try:
        while (task := _next(queue)) is not None:
            for move in task:
                move.write(targets[move.target])
    except BaseException:
        queue.clear()
        raise


def _next(queue: deque[list[Move]]) -> list[Move] | None:
    try:
        return queue.popleft()
    except IndexError:
        return None
