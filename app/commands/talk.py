"""How commands reach a running service, and the options that all of them have."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from app.commands.exits import Exit
from app.commands.screen import Screen
from app.listen import url_of
from app.remote.attempts import Retry
from app.remote.waiting import Client
from app.settings import Settings
from app.token import load_token

Url = Annotated[
    str | None,
    typer.Option(
        "--url", envvar="GRAFT_URL", help="Where Graft listens.  [default: of GRAFT_HOST and GRAFT_PORT]"
    ),
]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the token.  [env vars: GRAFT_TOKEN, GRAFT_TOKEN_FILE]")
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]

RETRY = Retry(times=3, pause_s=0.2)
"""A person waits at the other end."""


@contextmanager
def talking(url: str | None, token_file: Path | None, as_json: bool) -> Iterator[tuple[Client, Screen]]:
    """A client of the service, and what to show results on; ends the command if something goes wrong."""
    screen = Screen(as_json)
    with screen.failing():
        settings = Settings()
        address = url or url_of(settings.host, settings.port)
        token = _token(settings, token_file, screen)
        with Client(address, token, retry=RETRY) as client:
            yield client, screen


def _token(settings: Settings, token_file: Path | None, screen: Screen) -> str | None:
    if token_file is not None:
        return token_file.read_text(encoding="utf-8").strip()
    try:
        # Whether a listener would need a token is not a client's business.
        return load_token(settings.model_copy(update={"host": "127.0.0.1"}))
    except ValueError as error:
        screen.stop(Exit.FAILED, str(error))
