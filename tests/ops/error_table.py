"""The README's table of errors, made from the one table of codes.

`python -m tests.ops.error_table` writes it into the README.
"""

from pathlib import Path

from schemas.problems import STATUS

README = Path(__file__).parents[2] / "README.md"
BEGIN = "<!-- errors: python -m tests.ops.error_table -->\n"
END = "<!-- end of errors -->"


def error_table() -> str:
    """One row per code, in the order of the table of codes."""
    rows = [f"| `{code}` | {status} | {title} |" for code, (status, title) in STATUS.items()]
    return "\n".join(["| code | status | meaning |", "|---|---|---|", *rows]) + "\n"


def table_in(readme: str) -> str:
    """The table that stands in the README."""
    return readme.partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    """Write the table anew."""
    before, begin, rest = README.read_text().partition(BEGIN)
    README.write_text(before + begin + error_table() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
