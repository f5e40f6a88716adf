"""Commands that run on the machine of the engine: serve, probe, demo-model, health."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import IO, Annotated, NoReturn, cast

import httpx
import typer
from pydantic import ValidationError
from rich.console import Console

from app.commands.exits import Exit
from app.commands.json_lines import JsonLines
from app.commands.screen import Screen
from app.commands.talk import AsJson
from app.demo import DemoModelError, make_demo_model
from app.listen import AddressError, url_of
from app.logs import begin_logging, console_for
from app.probe import ProbeError, run_probe, table
from app.settings import Settings
from app.state_folder import StateFolderError, claimed
from app.supervisor import SECRET_VARIABLE, EngineStartError, ManagedEngine, engine_command
from app.supported import UnsupportedVllmError, installed_vllm
from app.token import load_token
from loaders.staged import refuse_full_disk
from schemas.model import Treatment
from schemas.problems import ProblemError


def serve(
    model: Annotated[str | None, typer.Argument(help="Checkpoint folder, or a name that vLLM knows.")] = None,
    vllm_args: Annotated[
        list[str] | None, typer.Argument(metavar="-- VLLM-ARGS…", help="Goes to vLLM as it is.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Where the admin listens.  [env var: GRAFT_HOST; default: 127.0.0.1]")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the admin.  [env var: GRAFT_PORT; default: 8001]")
    ] = None,
    engine_host: Annotated[
        str, typer.Option(envvar="GRAFT_ENGINE_HOST", help="Where vLLM listens.")
    ] = "127.0.0.1",
    engine_port: Annotated[int, typer.Option(envvar="GRAFT_ENGINE_PORT", help="Port of vLLM.")] = 8000,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Ledger, uploads, log and secret of the engine.  [env var: GRAFT_STATE_DIR; default: .graft]"
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="URL", envvar="GRAFT_ENGINE_URL", help="Attach to this vLLM instead of starting one."
        ),
    ] = None,
    engine_secret_file: Annotated[
        Path | None, typer.Option(envvar=SECRET_VARIABLE, help="Secret of the attached vLLM's bridge.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say each line as JSON.")] = False,
) -> None:
    """Run the admin service and, unless --engine is given, the vLLM server that it changes.

    GRAFT_… variables set what has no option here.
    """
    given = {"host": host, "port": port, "state_dir": state_dir}
    if engine is not None:
        if model is not None:
            raise typer.BadParameter("give either a MODEL to serve or --engine to attach to, not both")
        if engine_secret_file is None:
            raise typer.BadParameter("--engine needs --engine-secret-file")
        settings = _settings(**given, engine_url=engine, engine_secret_file=engine_secret_file)
        raise typer.Exit(_run(settings, None, as_json))
    if model is None:
        raise typer.BadParameter("give a MODEL to serve, or --engine to attach to")
    settings = _settings(**given, engine_url=url_of(engine_host, engine_port))
    state = settings.state_dir.absolute()
    secret_file = state / "engine.secret"
    try:
        command = engine_command(
            model,
            host=engine_host,
            port=engine_port,
            vllm_args=vllm_args or (),
            secret_file=secret_file,
            log=state / "engine.log",
            vllm=installed_vllm(),
            environ=os.environ,
        )
    except (UnsupportedVllmError, EngineStartError) as error:
        _refuse(str(error))
    record = state / "engine.json"
    managed = ManagedEngine(model, engine_host, engine_port, secret_file, record, command)
    raise typer.Exit(_run(settings.model_copy(update={"engine_secret_file": secret_file}), managed, as_json))


def demo_model(
    folder: Annotated[Path, typer.Argument(help="Where to put the model.")], as_json: AsJson = False
) -> None:
    """Make the demo model: a small Mixtral that answers in English. Nothing if it is there."""
    if not as_json:
        typer.echo(f"demo model: {folder}")
    try:
        made = make_demo_model(folder)
        if as_json:
            typer.echo(json.dumps({"folder": str(folder), "made": made}))
    except DemoModelError as error:
        Screen(as_json).stop(Exit.FAILED, f"the demo model could not be made:\n{error}")


def probe(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or a name that vLLM knows.")],
    vllm_args: Annotated[
        list[str] | None, typer.Argument(metavar="-- VLLM-ARGS…", help="Goes to vLLM as it is.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every tensor, for programs.")] = False,
) -> None:
    """Show how each tensor of a checkpoint would be updated, without serving it.

    Needs the memory that serving it needs. Status 2 if something that the engine loads cannot be updated.
    """
    screen = Screen(as_json)
    try:
        described = run_probe(model, vllm_args or (), installed_vllm(), os.environ)
    except (UnsupportedVllmError, ProbeError) as error:
        screen.stop(Exit.FAILED, str(error))
    screen.show(described, lambda: table(described))
    fixed = any(one.treatment is Treatment.UNSUPPORTED and one.loaded for one in described.tensors)
    raise typer.Exit(2 if fixed else 0)


def health() -> None:
    """End with status 0 if the service of GRAFT_HOST and GRAFT_PORT is ready, else 1 (for containers).

    Prints the answer, which is JSON.
    """
    settings = _settings()
    token = _token(settings)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(f"{url_of(settings.host, settings.port)}/health/ready", headers=headers, timeout=5)
    except httpx.HTTPError as error:
        _refuse(f"no answer: {error}")
    typer.echo(answer.text)
    raise typer.Exit(0 if answer.status_code == httpx.codes.OK else 1)


def _refuse(why: str) -> NoReturn:
    """End the command with status 1 and a message."""
    typer.echo(f"graft: {why}", err=True)
    raise typer.Exit(1)


def _settings(**given: object) -> Settings:
    """Settings from the environment, with those on top that were given on the command line."""
    try:
        return Settings.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        causes = [f"GRAFT_{str(e['loc'][0]).upper()}: {e['msg']}" for e in error.errors()]
        _refuse("\n".join(causes))


def _token(settings: Settings) -> str | None:
    try:
        return load_token(settings)
    except (ValueError, OSError) as error:
        _refuse(str(error))


def _run(settings: Settings, engine: ManagedEngine | None, as_json: bool) -> int:
    # Here, since all other commands do without the server, which takes half a second to import.
    from prometheus_client import disable_created_metrics

    from app.main import create_app
    from app.serve import Foreground

    begin_logging(settings)
    # Else /metrics has one more line for each of its lines, for when that was first counted.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    console = Console(file=cast(IO[str], JsonLines(sys.stdout))) if as_json else console_for(settings)
    if _token(settings) is None:
        said = f"no token is set: every process on this machine can change the weights ({settings.host})"
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    try:
        with claimed(settings.state_dir), refuse_full_disk():
            return asyncio.run(Foreground(create_app(settings), settings, engine, console).run())
    except (AddressError, StateFolderError) as error:
        _refuse(str(error))
    except ProblemError as error:
        _refuse(f"{settings.state_dir}: {error.detail}")
