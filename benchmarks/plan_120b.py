"""Starting: what Graft learns of a gpt-oss-120b before it may be changed.

Twin and trace are of its real shapes, on meta. Kinds are proved on real tensors of their real shapes, one
after the other; that of the vocabulary's takes 11 GB.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from torch import nn

from benchmarks.models import GPT_OSS_120B, configured, write_folder
from benchmarks.row import Condition, Row, Sense
from benchmarks.turns import seconds, shown
from loaders.engine.checkpoint import Checkpoint
from loaders.engine.closure import closures_of
from loaders.engine.trace import Traced, trace
from loaders.engine.twin import build_twin
from loaders.engine.workshop import Workshop

FIRST_S, SECOND_S = 60.0, 2.0


class Start:
    """One start: twin, trace and kinds; a second twin stands for the live model, whose memory is not here."""

    def __init__(self, folder: Path) -> None:
        """Folder of the checkpoint."""
        self._config = configured(folder)
        self._checkpoint = Checkpoint.open(folder)
        self._live = build_twin(self._config, nn.Module())
        self.steps: dict[str, float] = {}

    def run(self) -> None:
        """Note how long each step took."""
        twin: list[nn.Module] = []
        traced: list[Traced] = []
        workshop = Workshop(self._config)
        self.steps["twin"] = seconds(lambda: twin.append(build_twin(self._config, self._live)))
        self.steps["trace"] = seconds(lambda: traced.append(trace(twin[0], self._checkpoint)))
        self.steps["kinds"] = seconds(lambda: closures_of(self._config, workshop, self._live, twin[0]))
        if traced[0].refused or not all(traced[0].regions.get(name) for name in self._checkpoint.tensors):
            raise RuntimeError(f"not all tensors could be followed: {traced[0].refused}")


def _run(folder: Path) -> dict[str, float]:
    start = Start(folder)
    start.run()
    return start.steps


def _in_a_new_process(folder: Path) -> dict[str, float]:
    """Seconds of each step, where nothing is known yet but what the cache on disk holds."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_run, folder).result()


def _figure(steps: dict[str, float]) -> str:
    taken = ", ".join(f"{name} {shown(seconds)}" for name, seconds in steps.items())
    return f"{shown(sum(steps.values()))} ({taken})"


def measure(names: list[str]) -> Iterator[Row]:
    """The row of this module."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRAFT_CACHE_DIR"] = f"{folder}/cache"  # empty, whatever the user's holds
        model = Path(folder) / "model"
        write_folder(model, GPT_OSS_120B)
        first, second = (_in_a_new_process(model) for _ in range(2))
    first_s, second_s = sum(first.values()), sum(second.values())
    yield Row(
        names[0],
        "twin and trace of a bf16 gpt-oss-120b on meta, proofs of its kinds",
        f"{FIRST_S:g} s, {SECOND_S:g} s: the share that is used up",
        max(first_s / FIRST_S, second_s / SECOND_S),
        Sense.AT_MOST,
        1,
        (("first start", _figure(first)), ("second start", _figure(second))),
        (
            Condition(f"first < {FIRST_S:g} s", first_s < FIRST_S),
            Condition(f"second < {SECOND_S:g} s", second_s < SECOND_S),
        ),
    )
