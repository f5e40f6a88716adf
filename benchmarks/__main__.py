"""`python -m benchmarks [NAME…]`: measure rows, print a line of JSON for each, write `docs/benchmarks.md`."""

import argparse
import sys
import time
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.report import Entry, head, today, update
from benchmarks.suite_process import rows_of
from benchmarks.suites import all_names, chosen

REPORT = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def main() -> int:
    """Status 0 if every row was measured, whether or not it is met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"rows, all if none: {', '.join(all_names())}")
    names = parser.parse_args().names
    try:
        suites = chosen(names)
    except ValueError as error:
        parser.error(str(error))
    lost = []
    for module, rows in suites.items():
        begun = time.monotonic()
        measured = set()
        for row in rows_of(module, rows):
            update(REPORT, Entry(row, machine(), today(), head()), all_names())
            print(row.line(), flush=True)
            measured.add(row.name)
        print(f"{module}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
        lost += [name for name in rows if name not in measured]
    if lost:
        print(f"not measured: {', '.join(lost)}", file=sys.stderr)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
