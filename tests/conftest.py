"""What tests of every part share."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio, as the admin does."""
    return "asyncio"
