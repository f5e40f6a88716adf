"""What tests of every part share."""

import logging
import os
import tempfile
from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a GPU run where they are asked for, with `-m gpu`, and are not collected elsewhere."""
    if "gpu" in config.getoption("markexpr"):
        return
    elsewhere = [item for item in items if item.get_closest_marker("gpu")]
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True, scope="session")
def proofs_of_this_session() -> Iterator[None]:
    """Engines of one session share their proofs, and take none from the user's cache folder."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "GRAFT_CACHE_DIR", folder)
        yield


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio, as the admin does."""
    return "asyncio"


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command that runs in the test's process sets up logging for all, to a stream that is soon closed."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
