"""The README says what is so."""

import re
from pathlib import Path

import pytest

from app.supported import RANGE
from docs.made.hooks import PAGES
from schemas.problems import STATUS, Code
from tests.ops.error_table import README, error_table, table_in
from tests.ops.exit_table import exit_table, exits_in

DOCS = [README, README.parent / "CHANGELOG.md", *sorted((README.parent / "docs").rglob("*.md"))]


def test_the_error_table_is_the_table_of_codes() -> None:
    """Codes, statuses and meanings in the README equal those that the service answers with."""
    assert table_in(README.read_text()) == error_table(), "run: python -m tests.ops.error_table"
    assert list(STATUS) == list(Code)


def test_the_exit_statuses_are_those_of_the_command() -> None:
    """Statuses and meanings in the README equal those that commands end with."""
    assert exits_in(README.read_text()) == exit_table(), "run: python -m tests.ops.exit_table"


def test_the_supported_range_is_named() -> None:
    """The limits name the same vLLM versions that the start check enforces."""
    assert f"vLLM {RANGE}" in README.read_text()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(README.parent)))
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link, and every source file that the text names, exists."""
    text = path.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    made = {README.parent / "docs" / page for page in PAGES}  # by the build of the site, which checks these
    targets = [(path.parent / link).resolve() for link in links]
    assert [target for target in targets if not (target.exists() or target in made)] == []
    named = re.findall(r"`((?:app|loaders|schemas|tests|docs/made|examples)/[\w/]+\.py)`", text)
    assert [name for name in named if not (README.parent / name).exists()] == []


def test_routes_in_the_readme_exist() -> None:
    """Every `METHOD /path` of the README is a route of the service."""
    from app.main import create_app

    routes = {
        (method.upper(), re.sub(r"\{\w+(:path)?\}", "{}", path))
        for path, methods in create_app().openapi()["paths"].items()
        for method in methods
    }
    named = re.findall(r"`(GET|PUT|POST|DELETE) (/[\w/{}.]+)`", README.read_text())
    assert len(named) > 10
    missing = [(m, p) for m, p in named if (m, re.sub(r"\{\w+\}", "{}", p)) not in routes]
    assert missing == []
