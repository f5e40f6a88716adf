"""The report: `docs/benchmarks.md`, which keeps the rows of earlier runs until they are measured again."""

import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from benchmarks.row import Row, rounded

_FENCE = "```"
_DATA = f"{_FENCE}json"
_HEAD = """# Benchmarks

`make bench` writes this; `make bench ROWS="NAME…"` measures single rows anew and leaves others as they were.
Every row is measured side by side with what a user would pick instead, or against a limit, in one run on one
machine, both sides in turns.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A row, where it was measured and when."""

    row: Row
    machine: str
    day: str
    """ISO date."""
    commit: str = ""
    """Of this repository; what had changed beside it is not told."""

    def dump(self) -> str:
        """One line of JSON."""
        where = {"machine": self.machine, "day": self.day, "commit": self.commit}
        return json.dumps({**where, **self.row.dump()}, ensure_ascii=False)

    @staticmethod
    def load(line: str) -> "Entry":
        """The entry of a `dump`."""
        members: dict[str, Any] = json.loads(line)
        machine, day = members.pop("machine"), members.pop("day")
        commit = members.pop("commit", "")
        return Entry(Row.load(members), machine, day, commit)


def today() -> str:
    """The day, in UTC."""
    today: date = datetime.now(UTC).date()
    return today.isoformat()


def head() -> str:
    """The commit that is measured, as far as git can tell."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    answer = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def update(path: Path, entry: Entry, order: Sequence[str]) -> None:
    """Put the entry into the report in the place of an earlier one; `order` is that of the rows.

    What is not in `order` is dropped: there is no such row any more.
    """
    entries = {kept.row.name: kept for kept in read(path)} | {entry.row.name: entry}
    path.write_text(written([entries[name] for name in order if name in entries]))


def read(path: Path) -> list[Entry]:
    """The entries of a report; none if it is not there."""
    if not path.exists():
        return []
    _, _, rest = path.read_text().partition(f"{_DATA}\n")
    return [Entry.load(line) for line in rest.partition(_FENCE)[0].splitlines()]


def written(entries: Sequence[Entry]) -> str:
    """The report as Markdown."""
    parts = [_HEAD]
    for machine in dict.fromkeys(entry.machine for entry in entries):
        parts += [f"## {machine}\n", _table(entry for entry in entries if entry.machine == machine)]
    missed = [entry.row for entry in entries if not entry.row.met]
    if missed:
        parts.append("## What is missed, and why\n")
        parts += [f"**`{row.name}`**: {row.limit or 'not known yet.'}\n" for row in missed]
    parts.append("## Figures\n")
    parts += [_figures(entry.row) for entry in entries]
    parts += ["## Data\n", _DATA, *(entry.dump() for entry in entries), f"{_FENCE}\n"]
    return "\n".join(parts)


def _table(entries: Iterable[Entry]) -> str:
    lines = ["| row | what | against | ratio | target | met | at |", "|---|---|---|---|---|---|---|"]
    for entry in entries:
        row = entry.row
        also = "".join(f"; {condition.text}" for condition in row.conditions)
        cells = (
            f"`{row.name}`",
            row.what,
            row.against,
            f"{rounded(row.ratio):g}",
            f"{'reported' if row.target is None else f'{row.sense} {row.target:g}'}{also}",
            "yes" if row.met else "**no**",
            f"{entry.day} {entry.commit}".rstrip(),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _figures(row: Row) -> str:
    figures = "; ".join(f"{label} {value}" for label, value in row.figures)
    return f"- `{row.name}`: {figures or 'none'}."
