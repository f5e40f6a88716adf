"""Marks of the tests of the admin service."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark that keeps large uploads out of the quick tests."""
    config.addinivalue_line("markers", "big: sends a gigabyte; about 5 seconds")
