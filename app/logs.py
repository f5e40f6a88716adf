"""What the admin logs: one line per event, as JSON for machines or as text for a terminal.

Lines carry ids, names, sizes and times; never headers, bodies or parts of them.
"""

import io
import json
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import IO, cast

from rich.console import Console

from app.settings import LogFormat, Settings

_bound: ContextVar[Mapping[str, object]] = ContextVar("graft_log_fields")
_FIELDS = "graft_fields"
_QUIET = ("httpx", "httpcore")
"""Loggers that would tell of every question to the engine."""


@contextmanager
def bound(**fields: object) -> Iterator[None]:
    """Within this, and in tasks begun here, every line carries `fields`, such as `request="…"`."""
    token = _bound.set({**_bound.get({}), **fields})
    try:
        yield
    finally:
        _bound.reset(token)


def event(log: logging.Logger, level: int, message: str, **fields: object) -> None:
    """Log `message` with `fields` of its own."""
    log.log(level, message, extra={_FIELDS: fields})


def begin_logging(settings: Settings, stream: IO[str] | None = None) -> None:
    """Have the whole process log to `stream` (standard error), in the form that `settings` ask for."""
    target = stream or sys.stderr
    handler = logging.StreamHandler(target)
    handler.addFilter(_attach)
    handler.setFormatter(JsonLines() if _as_json(settings.log_format, target) else TextLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.log_level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def console_for(settings: Settings) -> Console:
    """Where what is said to a person goes: the terminal or, where all is JSON, the log."""
    if settings.log_format is not LogFormat.JSON:
        return Console()
    lines = LoggedText(logging.getLogger("graft"))
    return Console(file=cast("IO[str]", lines), width=1000)


class LoggedText(io.TextIOBase):
    """A text file whose lines become events."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._begun = ""

    def write(self, text: str) -> int:
        """Log every line that is complete now, unless it is blank."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line.strip():
                self._log.info("%s", line)
        return len(text)


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Time (UTC), level, logger and message; then what is bound, then the event's own fields."""
        document: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info and record.exc_info[1] is not None:
            document["exception"] = "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        return json.dumps(document, default=str)


class TextLines(logging.Formatter):
    """`12:30:01 warning app.link: message key=value`, and tracebacks as they are."""

    def format(self, record: logging.LogRecord) -> str:
        """The same as in JSON, for the eye."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        fields = "".join(
            f" {name}={json.dumps(value, default=str)}" for name, value in _fields(record).items()
        )
        line = f"{time} {record.levelname.lower()} {record.name}: {record.getMessage()}{fields}"
        if record.exc_info and record.exc_info[1] is not None:
            line += "\n" + "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        return line


def _attach(record: logging.LogRecord) -> bool:
    """What is bound where the event happens; the formatter may run elsewhere."""
    record.graft_bound = _bound.get({})
    return True


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {**getattr(record, "graft_bound", {}), **getattr(record, _FIELDS, {})}


def _as_json(wanted: LogFormat, stream: IO[str]) -> bool:
    if wanted is LogFormat.AUTO:
        return not stream.isatty()
    return wanted is LogFormat.JSON
