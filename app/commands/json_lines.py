"""Lines for programs: each line that is written becomes a JSON object with its time."""

import io
import json
from datetime import UTC, datetime
from typing import TextIO


class JsonLines(io.TextIOBase):
    """A text file that is no terminal."""

    def __init__(self, below: TextIO) -> None:
        self._below = below
        self._rest = ""

    def write(self, text: str) -> int:
        """Pass on what has become a whole line."""
        *whole, self._rest = (self._rest + text).split("\n")
        for line in whole:
            at = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._below.write(json.dumps({"at": at, "text": line}, ensure_ascii=False) + "\n")
        return len(text)

    def flush(self) -> None:
        """What is not a whole line yet stays."""
        self._below.flush()
