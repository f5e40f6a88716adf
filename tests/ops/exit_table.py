"""Writes the README's table of exit statuses: `python -m tests.ops.exit_table`."""

from app.commands.exits import MEANINGS
from tests.ops.error_table import README

BEGIN, END = "<!-- exits: python -m tests.ops.exit_table -->\n", "<!-- end of exits -->\n"


def exit_table() -> str:
    """The table in Markdown."""
    rows = [f"| {status:d} | {meaning} |\n" for status, meaning in MEANINGS.items()]
    return "".join(["| status | meaning |\n|---|---|\n", *rows])


def exits_in(text: str) -> str:
    """What stands in the table's place."""
    return text.partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    text = README.read_text()
    README.write_text(text.replace(BEGIN + exits_in(text) + END, BEGIN + exit_table() + END))
