"""The command line: `graft` with all its commands."""

from importlib.metadata import version as installed
from typing import Annotated

import typer

from app.commands import changing, differing, looking, serving, watching
from app.commands.exits import epilog

COMMANDS = (
    serving.serve,
    looking.status,
    looking.model,
    serving.probe,
    changing.push_expert,
    changing.push,
    differing.diff,
    looking.pull,
    changing.begin,
    changing.commit,
    changing.abort,
    changing.rollback,
    looking.versions,
    looking.show,
    changing.export,
    changing.reload,
    watching.watch,
    serving.health,
    serving.demo_model,
)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Change the weights of a live vLLM server, and put them back.",
    epilog=epilog(),
)
for command in COMMANDS:
    app.command()(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"graft {installed('graft-vllm')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
