"""What MkDocs asks while it builds the site: pages that no file under docs/ is for."""

import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from docs.made import api, cli, errors, metrics, settings

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"


def changelog() -> str:
    """The changelog, whose links start from the root of the repository."""
    return re.sub(r"\]\(docs/", "](", CHANGELOG.read_text())


PAGES: dict[str, Callable[[], str]] = {
    "reference/api.md": api.page,
    "reference/errors.md": errors.page,
    "reference/settings.md": settings.page,
    "reference/metrics.md": metrics.page,
    "reference/cli.md": cli.page,
    "changelog.md": changelog,
}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are made from the code."""
    for path, page in PAGES.items():
        files.append(File.generated(config, path, content=page()))
    return files
