"""`python -m benchmarks [NAME…]`: measure rows, print a line of JSON for each, write `docs/benchmarks.md`."""

import argparse
import importlib
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.report import Entry, today, update
from benchmarks.row import Row
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
        measured = _run(module, rows)
        print(f"{module}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
        lost += [name for name in rows if name not in measured]
    if lost:
        print(f"not measured: {', '.join(lost)}", file=sys.stderr)
    return 1 if lost else 0


def _run(module: str, names: list[str]) -> set[str]:
    """Measure in a process of its own, so that suites leave each other no memory; the rows that came."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_measure, args=(module, names, theirs))
    child.start()
    theirs.close()
    measured = set()
    while True:
        try:
            row: Row = ours.recv()
        except EOFError:
            break
        update(REPORT, Entry(row, machine(), today()), all_names())
        print(row.line(), flush=True)
        measured.add(row.name)
    child.join()
    return measured


def _measure(module: str, names: list[str], rows: Connection) -> None:
    os.dup2(2, 1)  # the lines of JSON are to be all that stands on stdout, whatever vLLM prints
    for row in importlib.import_module(module).measure(names):
        rows.send(row)


if __name__ == "__main__":
    sys.exit(main())
