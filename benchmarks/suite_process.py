"""Suites in processes of their own, so that they leave each other no memory, threads or settings."""

import importlib
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

from benchmarks.row import Row


def rows_of(module: str, names: list[str]) -> Iterator[Row]:
    """The rows that the module's `measure(names)` yields, as they come; fewer than asked for if it fails."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_measure, args=(module, names, theirs))
    child.start()
    theirs.close()
    try:
        while True:
            row: Row = ours.recv()
            yield row
    except EOFError:
        child.join()


def _measure(module: str, names: list[str], rows: Connection) -> None:
    os.dup2(2, 1)  # the lines of JSON are to be all that stands on stdout, whatever vLLM prints
    for row in importlib.import_module(module).measure(names):
        rows.send(row)
