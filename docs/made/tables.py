"""Markdown tables."""

from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells may hold Markdown, but no line breaks."""
    return "\n".join([_row(titles), _row(["---"] * len(titles)), *map(_row, rows)]) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
