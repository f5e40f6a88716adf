"""`graft watch`: what happens to the service, line by line."""

from functools import partial
from typing import Annotated

import typer

from app.commands.talk import AsJson, TokenFile, Url, talking
from app.remote.events import Event, events


def watch(
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.05)] = 1.0,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Tell of new versions, open transactions and the engine's state until Ctrl-C; JSON lines with --json."""
    with talking(url, token_file, as_json) as (client, screen):
        for event in events(client, every):
            screen.show(event, partial(_line, event))


def _line(event: Event) -> str:
    return f"{event.at.astimezone().strftime('%H:%M:%S')}  {event.kind:<13}{event.detail}"
