"""Tells a person how the start of the engine is going: a live line on a terminal, plain lines elsewhere."""

import time
from typing import Protocol

from rich.console import Console
from rich.status import Status
from rich.text import Text

PLAIN_EVERY_S = 5.0


class Progress(Protocol):
    """Takes what the engine is doing, over and over, until the start has ended."""

    def update(self, doing: str) -> None:
        """Say what the engine is doing now."""

    def close(self) -> None:
        """Leave the screen to what comes next."""


class LiveProgress:
    """One line with a spinner that is written over."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = time.monotonic()
        self._status = Status("starting the engine", console=console)
        self._status.start()

    def update(self, doing: str) -> None:
        """Show seconds since the start and as much of `doing` as fits."""
        head = f"starting the engine, {time.monotonic() - self._begun:.0f} s"
        # The spinner takes two columns; a line that wraps could not be written over.
        self._status.update(Text(f"{head}: {doing}"[: self._console.width - 3]))

    def close(self) -> None:
        """Remove the line."""
        self._status.stop()


class PlainProgress:
    """A line when there is something new to say, at most every `PLAIN_EVERY_S` seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = time.monotonic()
        self._said_at = float("-inf")
        self._said = ""

    def update(self, doing: str) -> None:
        """Print `doing` unless it was the last thing said, or too little time has passed."""
        now = time.monotonic()
        if doing != self._said and now - self._said_at >= PLAIN_EVERY_S:
            self._said, self._said_at = doing, now
            line = f"starting the engine, {now - self._begun:.0f} s: {doing}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing is left on the screen to remove."""


def progress_on(console: Console) -> Progress:
    """The kind of progress that suits `console`."""
    return LiveProgress(console) if console.is_terminal else PlainProgress(console)
