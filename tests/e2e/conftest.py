"""Stacks shared by the end-to-end tests: engine starts are dear, and at most two live at once."""

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest

from loaders.engine.demo_model import make_demo_mixtral
from loaders.engine.toy_model import make_toy_gptoss
from tests.e2e.stack import Stack

CORES = 2
"""Stacks alive at once have a core for each of their ranks: idle ranks spin, and would starve the others."""


class Stacks:
    """Starts stacks when they are asked for, and stops the one that was not asked for longest."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._alive: OrderedDict[tuple[Path, int, str], Stack] = OrderedDict()

    def on(
        self,
        model: Path,
        ranks: int = 1,
        max_model_len: int = 1024,
        parallel: str = "tensor",
        **variables: str,
    ) -> Stack:
        """The stack that serves this checkpoint folder on so many ranks; two ranks take both cores."""
        key = (model, ranks, parallel)
        if key not in self._alive:
            while sum(stack.ranks for stack in self._alive.values()) + ranks > CORES:
                self._alive.popitem(last=False)[1].stop()
            folder = self._root / f"stack-{model.name}-{ranks}-{parallel}"
            folder.mkdir(exist_ok=True)
            taken = {stack.cores for stack in self._alive.values()}
            cores = "0|1" if ranks == 2 else min({"0", "1"} - taken, default="0")
            stack = Stack(model, folder, cores, variables, parallel)
            stack.start(max_model_len)
            self._alive[key] = stack
        self._alive.move_to_end(key)
        return self._alive[key]

    def close(self) -> None:
        while self._alive:
            self._alive.popitem()[1].stop()


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def stacks(root: Path) -> Iterator[Stacks]:
    pool = Stacks(root)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def gptoss_model(root: Path) -> Path:
    """A toy gpt-oss whose hidden and intermediate sizes differ."""
    make_toy_gptoss(root / "gptoss", hidden=64, intermediate=96)
    return root / "gptoss"


@pytest.fixture(scope="session")
def square_model(root: Path) -> Path:
    """A toy gpt-oss whose hidden and intermediate sizes are equal, so that a transpose would not show."""
    make_toy_gptoss(root / "square", hidden=64, intermediate=64)
    return root / "square"


@pytest.fixture(scope="session")
def demo_model(root: Path) -> Path:
    """The demo Mixtral."""
    make_demo_mixtral(root / "demo")
    return root / "demo"


@pytest.fixture
def gptoss(stacks: Stacks, gptoss_model: Path) -> Stack:
    return stacks.on(gptoss_model)


@pytest.fixture
def square(stacks: Stacks, square_model: Path) -> Stack:
    return stacks.on(square_model)


@pytest.fixture
def demo_stack(stacks: Stacks, demo_model: Path) -> Stack:
    return stacks.on(demo_model)
