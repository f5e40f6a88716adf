"""What the command line refuses, and how it says so."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from app import cli
from app.commands import serving
from app.commands.exits import Exit
from app.listen import listen
from app.supported import RANGE, UnsupportedVllmError


@dataclass
class Ended:
    """How a command ended, and what it said."""

    status: object
    said: str


class Graft(Protocol):
    """Runs a command in this process, with no GRAFT_… variables but those given."""

    def __call__(self, *arguments: str, **environ: str) -> Ended: ...


@pytest.fixture
def graft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Graft:
    """The `graft` command."""

    def run(*arguments: str, **environ: str) -> Ended:
        for name in [name for name in os.environ if name.startswith("GRAFT_")]:
            monkeypatch.delenv(name)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["graft", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Ended(ended.value.code, captured.out + captured.err)

    return run


def test_the_command_is_installed() -> None:
    """`graft --version` runs from the environment's bin folder."""
    graft = Path(sys.executable).parent / "graft"
    said = subprocess.run([graft, "--version"], capture_output=True, text=True, check=True).stdout
    assert said.startswith("graft 0.")


def test_the_command_needs_neither_torch_nor_vllm() -> None:
    """Everything that the admin is made of imports without the engine's packages."""
    code = (
        "import sys; import app.commands.graft;"
        "print(sorted({'torch', 'vllm', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_the_command_loads_no_server() -> None:
    """What only a service is made of is not imported for the commands that talk to one."""
    code = (
        "import sys; import app.commands.graft;"
        "print(sorted({'fastapi', 'starlette', 'uvicorn', 'prometheus_client'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_ctrl_c_while_the_command_is_imported(tmp_path: Path) -> None:
    """An interrupt before any command has begun is status 130 and not a word, above all no traceback."""
    slow = tmp_path / "typer"
    slow.mkdir()
    (slow / "__init__.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(cli.__file__).parents[1],
        # A suite that runs in the background of a shell ignores it, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None and process.stdout.readline() == b"importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == Exit.INTERRUPTED


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "give a MODEL"),
        (["m", "--engine", "http://127.0.0.1:8000", "--engine-secret-file", "f"], "not both"),
        (["--engine", "http://127.0.0.1:8000"], "needs --engine-secret-file"),
        (["m", "--max-model-len", "512"], "--max-model-len"),
    ],
)
def test_wrong_usage_is_refused(graft: Graft, arguments: list[str], why: str) -> None:
    """Contradictory or unknown options end with status 2 and a text that names them."""
    ended = graft("serve", *arguments)
    assert ended.status == 2
    assert why in ended.said


def test_listening_to_strangers_needs_a_token(graft: Graft, tmp_path: Path) -> None:
    """Beyond loopback nothing starts without a token; the text names the setting."""
    ended = graft("serve", "m", "--host", "0.0.0.0", "--state-dir", str(tmp_path / "state"))
    assert ended.status == 1
    assert "GRAFT_TOKEN" in ended.said
    assert not (tmp_path / "state").exists()


def test_a_bad_setting_is_named_as_its_variable(graft: Graft) -> None:
    """A value of the wrong form is refused with the name of the variable that holds it."""
    ended = graft("serve", "m", GRAFT_BODY_BYTES="a lot")
    assert ended.status == 1
    assert ended.said.startswith("graft: GRAFT_BODY_BYTES:")


def test_an_unsupported_vllm_is_refused_at_start(graft: Graft, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends before anything is started, naming the range."""

    def unsupported() -> None:
        raise UnsupportedVllmError(f"works with vLLM {RANGE}")

    monkeypatch.setattr(serving, "installed_vllm", unsupported)
    ended = graft("serve", "m")
    assert ended.status == 1
    assert RANGE in ended.said


def test_a_model_that_is_not_there_is_refused_at_once(graft: Graft, tmp_path: Path) -> None:
    """No engine is started for a path that leads nowhere, and no state folder is made."""
    ended = graft("serve", str(tmp_path / "model"), "--state-dir", str(tmp_path / "state"))
    assert ended.status == 1
    assert ended.said.startswith(f"graft: there is no folder {tmp_path / 'model'}")
    assert list(tmp_path.iterdir()) == []


def test_taken_ports_are_named_before_anything_starts(graft: Graft, tmp_path: Path) -> None:
    """Where the engine's or the admin's port is taken the command says so and starts no engine."""
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        for ports in (("--port", "0", "--engine-port", port), ("--port", port, "--engine-port", "0")):
            ended = graft("serve", "m", *ports, "--state-dir", str(tmp_path))
            assert ended.status == 1
            assert f"127.0.0.1:{port} is in use" in ended.said
    assert not (tmp_path / "engine.log").exists()


def test_health_fails_when_nothing_answers(graft: Graft, tmp_path: Path) -> None:
    """The container's health command says why and ends with status 1."""
    ended = graft("health", GRAFT_PORT="9")
    assert ended.status == 1
    assert "no answer" in ended.said


def test_the_demo_model_is_made_once(graft: Graft, tmp_path: Path) -> None:
    """Where there is a model the command does nothing at all."""
    (tmp_path / "config.json").write_text("mine")
    assert graft("demo-model", str(tmp_path)).status == 0
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == "mine"


def test_a_demo_model_that_cannot_be_made_says_why(graft: Graft, tmp_path: Path) -> None:
    """The end of the maker's output is shown, and no half-made folder stays behind."""
    (tmp_path / "transformers.py").write_text("raise ImportError('no such luck')")
    ended = graft("demo-model", str(tmp_path / "demo"), PYTHONPATH=str(tmp_path))
    assert ended.status == 1
    assert "no such luck" in ended.said
    ended = graft("demo-model", str(tmp_path / "demo"), "--json", PYTHONPATH=str(tmp_path))
    assert (ended.status, json.loads(ended.said)["exit"]) == (1, 1)
    assert not (tmp_path / "demo").exists()
