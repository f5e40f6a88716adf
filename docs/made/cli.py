"""The page of the command line, from the commands' own help."""

import re

import typer
from typer.cli import get_docs_for_click

from app.commands.exits import MEANINGS
from app.commands.graft import app
from docs.made.tables import table

TITLE = "# Command line\n"
EPILOG = re.compile(r"^Exit status:\n.*?(?=^\*\*Commands)", re.MULTILINE | re.DOTALL)


def page() -> str:
    """Every command with its arguments and options, and the exit statuses."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="graft")
    statuses = table(["status", "meaning"], ([str(int(status)), text] for status, text in MEANINGS.items()))
    text = EPILOG.sub(lambda _: f"**Exit status**:\n\n{statuses}\n", text)
    return text.replace("# `graft`\n", TITLE, 1)
