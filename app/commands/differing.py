"""`graft diff`: two checkpoints → a patch batch."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.filesize import decimal

from app.commands.exits import Exit
from app.commands.screen import Screen
from app.commands.talk import AsJson
from app.diff import Difference, difference
from app.remote.bodies import Body
from app.remote.files import appearing

Checkpoint = Annotated[Path, typer.Argument(exists=True, help="A checkpoint folder or a safetensors file.")]


class Written(BaseModel):
    """A patch batch that was written, as JSON; no file if there was nothing to write."""

    file: str | None
    nbytes: int
    tensors: int
    sparse: int
    dense: int
    elements: int


def diff(
    old: Checkpoint,
    new: Checkpoint,
    output: Annotated[Path, typer.Option("--output", "-o", help="The patch batch to write, for graft push.")],
    as_json: AsJson = False,
) -> None:
    """Write what leads from the checkpoint OLD to NEW as a patch batch.

    Bits are compared. Each tensor that differs is sparse or dense, whichever is smaller. Memory does not grow
    with the checkpoints. If they are equal no file is written, and the exit status is 8.
    """
    screen = Screen(as_json)
    with screen.failing():
        with ExitStack() as stack:
            with screen.transfer("comparing") as watch:
                compared = difference(old, new, output.absolute().parent, watch)
                found = stack.enter_context(compared)
            if found.body is not None:
                _write(screen, found.body, output)
        written = _written(found, output)
        screen.show(written, lambda: _text(written))
        if found.body is None:
            raise typer.Exit(Exit.NOTHING)


def _write(screen: Screen, body: Body, output: Path) -> None:
    with screen.transfer("writing") as watch, appearing(output) as file:
        for chunk in body.watched(watch).chunks():
            file.write(chunk)


def _written(found: Difference, output: Path) -> Written:
    return Written(
        file=str(output) if found.body else None,
        nbytes=found.body.nbytes if found.body else 0,
        tensors=found.tensors,
        sparse=found.sparse,
        dense=found.dense,
        elements=found.elements,
    )


def _text(written: Written) -> str:
    if written.file is None:
        return f"nothing to push: all {written.tensors} tensors are equal, bit for bit"
    return (
        f"{written.file}: {decimal(written.nbytes)}, {written.elements} elements; "
        f"of {written.tensors} tensors {written.sparse} changed in places and {written.dense} as a whole"
    )
