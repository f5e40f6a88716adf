"""The entry point of the `graft` command; the command itself is `app/commands/graft.py`."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from app.commands.exits import Exit


def main() -> None:
    """Run the command. Ctrl-C before it has begun, while it is being imported, ends it without a word."""
    with _leaving():
        from typer.main import get_command

        from app.commands.graft import app

        command = get_command(app)
    command()


@contextmanager
def _leaving() -> Iterator[None]:
    """Within this Ctrl-C, unless it is ignored, ends the process at once.

    It is no exception then: those are printed and forgotten in callbacks, of which imports have many.
    """
    raising = signal.getsignal(signal.SIGINT)
    if raising is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    yield
    if raising is signal.default_int_handler:
        signal.signal(signal.SIGINT, raising)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(Exit.INTERRUPTED)


if __name__ == "__main__":
    main()
