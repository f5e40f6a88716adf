"""Rows, the report that keeps them, and the choice of what is measured. Nothing is timed here."""

import json
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.machine import machine
from benchmarks.report import Entry, read, update
from benchmarks.row import Condition, Row, Sense
from benchmarks.suites import SUITES, all_names, chosen


def row(name: str = "one", ratio: float = 2.0, sense: Sense = Sense.AT_LEAST, **members: object) -> Row:
    made: dict[str, object] = {"what": "this", "against": "that", "target": 1.5} | members
    return Row(name=name, ratio=ratio, sense=sense, **made)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ratio", "sense", "holds", "met"),
    [
        (1.5, Sense.AT_LEAST, True, True),
        (1.4, Sense.AT_LEAST, True, False),
        (1.5, Sense.AT_MOST, True, True),
        (1.6, Sense.AT_MOST, True, False),
        (1.4, Sense.AT_MOST, False, False),
    ],
)
def test_a_row_is_met_on_the_right_side_of_its_target(
    ratio: float, sense: Sense, holds: bool, met: bool
) -> None:
    """The sense says which side counts, and every condition has to hold too."""
    found = row(ratio=ratio, sense=sense, conditions=(Condition("and this", holds),))
    assert found.met is met


def test_what_is_only_reported_is_met(tmp_path: Path) -> None:
    """A row without a target is met, unless a condition does not hold; the report calls it reported."""
    assert row(target=None).met and json.loads(row(target=None).line())["target"] is None
    assert not row(target=None, conditions=(Condition("and this", False),)).met
    update(tmp_path / "report.md", Entry(row(target=None), "this machine", "2026-01-02"), ["one"])
    assert "| reported |" in (tmp_path / "report.md").read_text()
    assert read(tmp_path / "report.md")[0].row == row(target=None)


def test_a_row_ends_in_one_line_of_json() -> None:
    """Name, ratio and target as numbers, and whether it is met; nothing else."""
    assert json.loads(row(ratio=2.3456).line()) == {"name": "one", "ratio": 2.35, "target": 1.5, "met": True}
    assert "\n" not in row().line()


def test_the_report_keeps_rows_of_earlier_runs(tmp_path: Path) -> None:
    """A row that is measured again replaces its earlier entry; the others stay as they were."""
    path = tmp_path / "benchmarks.md"
    figures = (("it took", "3 ms"),)
    first = Entry(row("one", 1.0, limit="the disk", figures=figures), "a machine", "2020-01-02")
    second = Entry(row("two", conditions=(Condition("and this", True),)), "another", "2020-01-03")
    for entry in (second, first):
        update(path, entry, ["one", "two"])
    assert read(path) == [first, second]
    again = Entry(row("one", 3.0), "a machine", "2020-01-04")
    update(path, again, ["one", "two"])
    assert read(path) == [again, second]


def test_the_report_says_why_a_target_is_missed(tmp_path: Path) -> None:
    """Machines, the limit of what is missed, and the figures stand in the text."""
    path = tmp_path / "benchmarks.md"
    figures = (("it took", "3 ms"),)
    update(path, Entry(row(ratio=1.0, limit="the disk", figures=figures), "a machine", "2020-01-02"), ["one"])
    text = path.read_text()
    assert "## a machine" in text and "| >= 1.5 | **no** |" in text
    assert "**`one`**: the disk" in text and "it took 3 ms" in text


def test_the_machine_is_hardware_alone() -> None:
    """Cores and memory are there, the host's name and paths are not."""
    found = machine()
    assert "cores" in found and "GiB" in found
    assert socket.gethostname() not in found and "/" not in found


def test_rows_are_chosen_by_name() -> None:
    """Nothing named is everything; a name that is no row is refused."""
    assert [name for names in chosen([]).values() for name in names] == all_names()
    assert chosen(["upload_4", "sparse_1"]) == {
        "benchmarks.sparse": ["sparse_1"],
        "benchmarks.upload": ["upload_4"],
    }
    with pytest.raises(ValueError, match="no such rows: sparse"):
        chosen(["sparse"])


def test_every_suite_is_there() -> None:
    """Modules of the table exist, and no row is measured by two."""
    assert all(find_spec(module) for module in SUITES)
    assert len(all_names()) == len(set(all_names()))
