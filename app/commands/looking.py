"""Commands that change nothing: status, model, versions, show, pull."""

import re
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from app.commands import texts
from app.commands.talk import AsJson, TokenFile, Url, talking
from app.remote import calls
from app.remote.call import Call, ReadBack
from app.remote.waiting import Client
from schemas.model import CheckpointTensor

_EXPERT = re.compile(r"([0-9]+)/([0-9]+)")


class Tensors(BaseModel):
    """All tensors that were asked for, as JSON."""

    tensors: tuple[CheckpointTensor, ...]


class Pulled(BaseModel):
    """A file with weights, as JSON."""

    version: str
    file: str
    nbytes: int


def status(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Show the engine, its version, open transactions and budgets."""
    with talking(url, token_file, as_json) as (client, screen):
        found = client.status()
        screen.show(found, lambda: texts.status_text(found))


def model(
    tensors: Annotated[bool, typer.Option("--tensors", help="Every tensor and how it is updated.")] = False,
    prefix: Annotated[str, typer.Option(help="Only tensors whose names start so.")] = "",
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the model, what an expert consists of, and with --tensors or --prefix what can be updated."""
    with talking(url, token_file, as_json) as (client, screen):
        if tensors or prefix:
            found = Tensors(tensors=tuple(_tensors(client, prefix)))
            screen.show(found, lambda: texts.tensors_table(found.tensors))
            return
        described = client.model()
        screen.show(described, lambda: texts.model_text(described))


def versions(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Show the history, oldest first; * is the version that is served."""
    with talking(url, token_file, as_json) as (client, screen):
        found = client.versions()
        screen.show(found, lambda: texts.versions_table(found))


def show(
    version: Annotated[str, typer.Argument(help="A version, in decimal.")] = "current",
    transaction: Annotated[str | None, typer.Option(metavar="ID", help="A transaction instead.")] = None,
    operation: Annotated[str | None, typer.Option(metavar="ID", help="An operation instead.")] = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show a version with its receipt, or a transaction, or an operation."""
    with talking(url, token_file, as_json) as (client, screen):
        if transaction is not None:
            opened = client.send(calls.transaction_state(transaction))
            screen.show(opened, lambda: texts.transaction_text(opened))
        elif operation is not None:
            followed = client.operation(operation)
            screen.show(followed, lambda: texts.operation_text(followed))
        else:
            found = client.version(version)
            screen.show(found, lambda: texts.version_text(found))


def pull(
    what: Annotated[str, typer.Argument(help="A checkpoint tensor's name, or LAYER/EXPERT.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Safetensors file to write.")],
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Read weights back from the engine: one tensor, or one expert named as in an upload."""
    with talking(url, token_file, as_json) as (client, screen):
        with screen.transfer(f"pulling {what}") as watch:
            version = client.download(_weights(what), output, watch)
        pulled = Pulled(version=str(version), file=str(output), nbytes=output.stat().st_size)
        screen.show(pulled, lambda: f"{output}: {what} of version {version}")


def _weights(what: str) -> Call[ReadBack]:
    expert = _EXPERT.fullmatch(what)
    return calls.read_expert(int(expert[1]), int(expert[2])) if expert else calls.read_tensor(what)


def _tensors(client: Client, prefix: str) -> list[CheckpointTensor]:
    """All pages."""
    found: list[CheckpointTensor] = []
    after: str | None = ""
    while after is not None:
        page = client.tensors(prefix, after)
        found.extend(page.tensors)
        after = page.next
    return found
