"""What tests of every part share."""

import os
import tempfile
from collections.abc import Iterator

import pytest


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
