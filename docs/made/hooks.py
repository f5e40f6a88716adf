"""What MkDocs asks while it builds the site: pages that no file under docs/ is for."""

import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.made import api, cli, errors, events, metrics, settings

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"


def changelog() -> str:
    """The changelog, whose links start from the root of the repository."""
    return re.sub(r"\]\(docs/", "](", CHANGELOG.read_text())


PAGES: dict[str, Callable[[], str]] = {
    "reference/api.md": api.page,
    "reference/errors.md": errors.page,
    "reference/events.md": events.page,
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


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files beside docs/, which work where the repository is read, are their names here."""
    root = Path(config.docs_dir).parent
    folder = Path(config.docs_dir, page.file.src_uri).parent

    def named(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        beside = target.exists() and root in target.parents and Path(config.docs_dir) not in target.parents
        return f"`{target.relative_to(root)}`" if beside else link[0]

    return re.sub(r"\[([^\]]*)\]\(([^)#:]+)\)", named, markdown)
