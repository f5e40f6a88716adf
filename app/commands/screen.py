"""What commands show: results on stdout, for people or as JSON; progress on stderr, on terminals alone."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import httpx
import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from app.commands.exits import Exit
from app.diff import DiffError
from app.remote.bodies import Watch
from app.remote.errors import (
    AnswerLost,
    BadAnswer,
    Conflict,
    GraftError,
    NotDone,
    Refused,
    StateUnknown,
    Unreachable,
)
from schemas.problems import ProblemError

_ENDLESS = 1 << 20
"""Columns where there is no terminal: whoever reads a pipe reads lines, however long."""

_KINDS: tuple[tuple[type[GraftError], Exit], ...] = (
    (AnswerLost, Exit.UNKNOWN),
    (StateUnknown, Exit.UNKNOWN),
    (Conflict, Exit.CONFLICT),
    (NotDone, Exit.NOT_DONE),
    (Refused, Exit.REFUSED),
    (BadAnswer, Exit.UNREACHABLE),
    (Unreachable, Exit.UNREACHABLE),
)


class Screen:
    """One command's output."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def show(self, result: BaseModel, shown: Callable[[], RenderableType]) -> None:
        """What a command came to."""
        if self._as_json:
            typer.echo(result.model_dump_json())
            return
        console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else _ENDLESS)
        console.print(shown(), soft_wrap=isinstance(shown, str))

    def note(self, text: str) -> None:
        """Something beside the results, while the command goes on."""
        typer.echo(json.dumps({"detail": text}) if self._as_json else f"graft: {text}", err=True)

    def stop(self, status: Exit, why: str, problem: dict[str, object] | None = None) -> NoReturn:
        """End the command with a status, and say why on stderr."""
        if self._as_json:
            text = json.dumps({"exit": int(status), "detail": why, **(problem or {})})
        else:
            text = f"graft: {why}"
        typer.echo(text, err=True)
        raise typer.Exit(status)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Ends the command in the way that suits what was raised within."""
        try:
            yield
        except GraftError as error:
            why = "\n".join([str(error), *_faults(error), *getattr(error, "__notes__", ())])
            self.stop(_exit_of(error), why, error.problem if isinstance(error, Refused) else None)
        except ValidationError as error:
            self.stop(Exit.USAGE, "; ".join(f"{_where(e['loc'])}{e['msg']}" for e in error.errors()))
        except httpx.InvalidURL as error:
            self.stop(Exit.USAGE, f"the address is no URL: {error}")
        except (DiffError, OSError) as error:
            self.stop(Exit.FAILED, str(error))
        except ProblemError as error:
            self.stop(Exit.FAILED, error.detail)
        except KeyboardInterrupt as error:
            self.stop(Exit.INTERRUPTED, "\n".join(["interrupted", *getattr(error, "__notes__", ())]))

    @contextmanager
    def transfer(self, what: str) -> Iterator[Watch]:
        """A bar for bytes that pass, with rate and time left."""
        columns = (
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with _progress(TextColumn("{task.description}", markup=False), *columns) as progress:
            task = progress.add_task(what, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """A line for work of which nobody knows how far it is, with the seconds since its start."""
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with _progress(*columns) as progress:
            progress.add_task(what, total=None)
            yield


def _progress(*columns: ProgressColumn) -> Progress:
    """Progress that leaves nothing behind, and shows nothing where nobody looks."""
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def _exit_of(error: GraftError) -> Exit:
    """The status that tells of this error."""
    return next((status for kind, status in _KINDS if isinstance(error, kind)), Exit.FAILED)


def _faults(error: GraftError) -> list[str]:
    """Each of the faults that a refusal lists, if it is more than one."""
    listed = error.problem.get("errors") if isinstance(error, Refused) else None
    if not isinstance(listed, list) or len(listed) < 2:
        return []
    return [f"  {one['detail']}" for one in listed if isinstance(one, dict) and "detail" in one]


def _where(location: tuple[int | str, ...]) -> str:
    return f"{'.'.join(str(part) for part in location)}: " if location else ""
