"""`graft watch`: what happens to the service, line by line."""

from collections.abc import Iterable, Iterator
from functools import partial

import typer

from app.commands.news import News
from app.commands.screen import Screen
from app.commands.talk import AsJson, TokenFile, Url, talking
from app.commands.texts import time_text
from app.remote.errors import Unreachable
from app.remote.events import Told
from app.remote.waiting import Client


def watch(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Tell of versions, transactions, refused uploads, operations, the engine and baselines until Ctrl-C.

    With --json, every event of GET /v1/events as it comes, one a line. A lost connection is told on stderr,
    and made anew.
    """
    with talking(url, token_file, as_json) as (client, screen):
        stream = client.events(connection=partial(_connection, screen))
        for line in (told.text for told in stream) if as_json else _lines(client, stream):
            typer.echo(line)


def _lines(client: Client, stream: Iterable[Told]) -> Iterator[str]:
    news = News(client)
    for told in stream:
        for at, line in news.lines(told.event):
            yield f"{time_text(at)}  {line}"


def _connection(screen: Screen, trouble: Unreachable | None) -> None:
    screen.note(f"{trouble}; trying again" if trouble else "connected again")
