"""Commands that change weights: push, push-expert, begin, commit, abort, rollback, reload, export."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, cast

import typer

from app.commands import texts
from app.commands.screen import Screen
from app.commands.talk import AsJson, TokenFile, Url, talking
from app.remote import calls
from app.remote.bodies import Body
from app.remote.call import Call
from app.remote.calls import Choices, FlightChoices
from app.remote.waiting import Client
from loaders.folder import CheckpointFolder
from loaders.header import HeaderLimits
from schemas.operations import Operation, OperationState
from schemas.transactions import InFlight, Receipt, Upload

InFlightOption = Annotated[
    InFlight | None, typer.Option(help="What happens to requests that run.  [default: recompute]")
]
DrainTimeout = Annotated[
    float | None, typer.Option(help="Seconds that --in-flight wait waits for them to end.")
]
Label = Annotated[str | None, typer.Option(help="A remark that the version keeps.")]
BaseVersion = Annotated[str | None, typer.Option(help="Refuse if another version is the current one.")]
AllowNonfinite = Annotated[bool, typer.Option("--allow-nonfinite", help="Take NaN and infinity, too.")]
Transaction = Annotated[
    str | None, typer.Option(metavar="ID", help="Upload into this open transaction, and do not commit.")
]
File = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A safetensors file.")]


def push(
    paths: Annotated[
        list[Path],
        typer.Argument(exists=True, help="Patch batches, safetensors files, or checkpoint folders."),
    ],
    transaction: Transaction = None,
    label: Label = None,
    base_version: BaseVersion = None,
    in_flight: InFlightOption = None,
    drain_timeout: DrainTimeout = None,
    allow_nonfinite: AllowNonfinite = False,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Upload files and apply all of them as one version.

    A patch batch changes what it lists. Every tensor of another safetensors file, or of a checkpoint
    folder's files, replaces the one of its name.
    """
    with talking(url, token_file, as_json) as (client, screen):
        choices = _choices(label, base_version, in_flight, drain_timeout, allow_nonfinite)
        files = [file for path in paths for file in _files(path)]

        def stage(id: str) -> None:
            for file in files:
                _sent(client, screen, file, lambda body: calls.stage_patches(id, body))

        _push(client, screen, transaction, choices, stage)


def push_expert(
    layer: Annotated[int, typer.Argument(help="The layer's number in the checkpoint.", min=0)],
    expert: Annotated[int, typer.Argument(help="The expert's number.", min=0)],
    file: File,
    partial: Annotated[
        bool, typer.Option("--partial", help="The file has only some of the expert's tensors.")
    ] = False,
    transaction: Transaction = None,
    label: Label = None,
    base_version: BaseVersion = None,
    in_flight: InFlightOption = None,
    drain_timeout: DrainTimeout = None,
    allow_nonfinite: AllowNonfinite = False,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Upload one expert and apply it."""
    with talking(url, token_file, as_json) as (client, screen):
        choices = _choices(label, base_version, in_flight, drain_timeout, allow_nonfinite)

        def stage(id: str) -> None:
            _sent(
                client,
                screen,
                file,
                lambda body: calls.stage_expert(id, layer, expert, body, partial=partial),
            )

        _push(client, screen, transaction, choices, stage)


def begin(
    label: Label = None,
    base_version: BaseVersion = None,
    in_flight: InFlightOption = None,
    drain_timeout: DrainTimeout = None,
    allow_nonfinite: AllowNonfinite = False,
    expires_in: Annotated[float | None, typer.Option(help="Seconds until it is given up.")] = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Open a transaction for uploads with --transaction, and print its id; see commit and abort."""
    with talking(url, token_file, as_json) as (client, screen):
        choices = _choices(label, base_version, in_flight, drain_timeout, allow_nonfinite)
        if expires_in is not None:
            choices["expires_in_s"] = expires_in
        opened = client.send(calls.open_transaction(**choices))
        screen.show(opened, lambda: opened.id)


def commit(
    transaction: Annotated[str, typer.Argument(help="Its id.")],
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Apply all that was uploaded into a transaction."""
    with talking(url, token_file, as_json) as (client, screen):
        _done(client, screen, calls.commit(transaction), "committing")


def abort(
    transaction: Annotated[str, typer.Argument(help="Its id.")],
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Drop a transaction and all that was uploaded into it."""
    with talking(url, token_file, as_json) as (client, screen):
        dropped = client.send(calls.abort(transaction))
        screen.show(dropped, lambda: texts.transaction_text(dropped))


def rollback(
    version: Annotated[str | None, typer.Argument(help="The version to go back to.")] = None,
    baseline: Annotated[str | None, typer.Option(help="A baseline's name instead.")] = None,
    in_flight: InFlightOption = None,
    drain_timeout: DrainTimeout = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Put the weights of an earlier version back, bit for bit; that is a new version, too."""
    if (version is None) == (baseline is None):
        raise typer.BadParameter("give either a VERSION or --baseline")
    with talking(url, token_file, as_json) as (client, screen):
        call = calls.rollback(version, to_baseline=baseline, **_flight(in_flight, drain_timeout))
        _done(client, screen, call, "rolling back")


def reload(
    path: Annotated[str | None, typer.Argument(help="A checkpoint folder on the server.")] = None,
    label: Label = None,
    base_version: BaseVersion = None,
    in_flight: InFlightOption = None,
    drain_timeout: DrainTimeout = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Read all weights anew, from the folder that they came from or from another of the same model."""
    with talking(url, token_file, as_json) as (client, screen):
        flight = _flight(in_flight, drain_timeout)
        call = calls.reload(path, base_version=base_version, label=label, **flight)
        _done(client, screen, call, "reloading")


def export(
    version: Annotated[str, typer.Argument(help="A version whose weights the engine runs.")],
    path: Annotated[str, typer.Argument(help="The folder to make, on the server.")],
    wait: Annotated[bool, typer.Option(help="Follow it to its end; Ctrl-C cancels it.")] = True,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Write the weights that the engine runs as a checkpoint folder on the server."""
    with talking(url, token_file, as_json) as (client, screen):
        operation = client.export(version, path)
        if wait:
            operation = _exported(client, screen, operation)
        screen.show(operation, lambda: texts.operation_text(operation))


def _choices(
    label: str | None,
    base_version: str | None,
    in_flight: InFlight | None,
    drain_timeout: float | None,
    allow_nonfinite: bool,
) -> Choices:
    """What was given; the rest is left to the service."""
    given = {"label": label, "base_version": base_version, "allow_nonfinite": allow_nonfinite or None}
    flight = _flight(in_flight, drain_timeout)
    return cast(Choices, {**flight, **{name: value for name, value in given.items() if value is not None}})


def _flight(in_flight: InFlight | None, drain_timeout: float | None) -> FlightChoices:
    given = {"in_flight": in_flight, "drain_timeout_s": drain_timeout}
    return cast(FlightChoices, {name: value for name, value in given.items() if value is not None})


def _files(path: Path) -> Sequence[Path]:
    """The files to upload for a path: a folder's are those that an engine would load."""
    if not path.is_dir():
        return (path,)
    return [shard.path for shard in CheckpointFolder.open(path, HeaderLimits()).shards]


def _sent(client: Client, screen: Screen, file: Path, describe: Callable[[Body], Call[Upload]]) -> None:
    with screen.transfer(f"sending {file.name}") as watch:
        client.send(describe(Body.of_file(file).watched(watch)))


def _push(
    client: Client, screen: Screen, id: str | None, choices: Choices, stage: Callable[[str], None]
) -> None:
    """Stage in an open transaction, or in one that is then committed."""
    if id is not None:
        stage(id)
        staged = client.send(calls.transaction_state(id))
        screen.show(staged, lambda: texts.transaction_text(staged))
        return
    with client.transaction(**choices) as change:
        stage(change.id)
        with screen.working("committing"):
            receipt = change.commit()
    screen.show(receipt, lambda: texts.receipt_text(receipt))


def _done(client: Client, screen: Screen, call: Call[Receipt], doing: str) -> None:
    """Make a change in the background and follow it: it goes on if nobody waits any more."""
    operation = client.send(calls.in_background(call))
    try:
        with screen.working(doing):
            receipt = client.wait(operation).receipt
    except KeyboardInterrupt as interrupted:
        interrupted.add_note(f"it goes on; see `graft show --operation {operation.id}`")
        raise
    assert receipt is not None  # a change can't be cancelled, so it is done
    screen.show(receipt, lambda: texts.receipt_text(receipt))


def _exported(client: Client, screen: Screen, operation: Operation) -> Operation:
    try:
        with screen.transfer("exporting") as watch:

            def seen(now: Operation) -> None:
                if now.export:
                    watch(now.export.nbytes, now.export.of_nbytes)

            return client.wait(operation, seen)
    except KeyboardInterrupt as interrupted:
        interrupted.add_note(_left_of(client.cancel(operation.id)))
        raise


def _left_of(export: Operation) -> str:
    """What became of an export that was to be cancelled: it may have ended just before."""
    if export.state is OperationState.CANCELLED:
        return "the export is cancelled; nothing is left of it"
    return f"too late to cancel the export:\n{texts.operation_text(export)}"
