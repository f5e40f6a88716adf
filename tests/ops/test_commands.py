"""The commands that talk to a running service: what they do, show, and end with."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from app.commands import talk
from app.commands.exits import MEANINGS
from app.commands.graft import COMMANDS, app
from app.remote.attempts import Retry
from app.remote.bodies import Body
from app.remote.waiting import Client
from schemas.bridge import RankError
from schemas.problems import Code
from tests.fakes.admin import Q_PROJ, expert_body, q_proj_body
from tests.fakes.checkpoint import parts, write_checkpoint
from tests.fakes.engine import base_weights
from tests.fakes.safetensors import body, parse
from tests.ops.alive import Alive, alive

GRAFT = str(Path(sys.executable).parent / "graft")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Alive]:
    with alive(tmp_path) as running:
        yield running


@pytest.fixture
def graft(service: Alive, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command in this process; how it ended and what it said."""
    monkeypatch.setattr(talk, "RETRY", Retry(times=1, pause_s=0.01))

    def run(*arguments: object, **variables: str) -> Result:
        env = {name: None for name in os.environ if name.startswith("GRAFT_")}
        env |= {"GRAFT_URL": service.url, "GRAFT_STATE_DIR": "/nowhere", **variables}
        return CliRunner().invoke(app, [str(one) for one in arguments], env=env)

    return run


@pytest.fixture
def expert(tmp_path: Path) -> Path:
    (tmp_path / "expert.safetensors").write_bytes(expert_body(3))
    return tmp_path / "expert.safetensors"


@pytest.fixture
def q_proj(tmp_path: Path) -> Path:
    (tmp_path / "q_proj.safetensors").write_bytes(q_proj_body(4))
    return tmp_path / "q_proj.safetensors"


def document(ended: Result) -> Any:
    """What a command said as JSON, all went well."""
    assert ended.exit_code == 0, ended.output
    assert ended.stderr == ""
    return json.loads(ended.stdout)


def test_looking_around(graft: Callable[..., Result], service: Alive) -> None:
    """status, model, versions and show tell people and programs what the service says."""
    assert document(graft("status", "--json"))["writable"]
    assert document(graft("model", "--json"))["experts"] == 4
    assert len(document(graft("model", "--tensors", "--json"))["tensors"]) == 14
    assert document(graft("versions", "--json"))["current"] == "0"
    assert document(graft("show", "--json"))["version"] == "0"
    assert document(graft("show", "0", "--json"))["kind"] == "base"
    assert f"engine       {service.admin.service.client.url}, answers" in graft("status").stdout
    assert "gate_up_proj  BF16 [8, 12]" in graft("model").stdout
    table = graft("model", "--prefix", "model.").stdout
    assert "model.layers.*.self_attn.q_proj.weight" in table
    assert "a fake reason" in table
    assert "0*" in graft("versions").stdout
    assert graft("show").stdout.startswith("version 0: base")


def test_pushing_an_expert_and_going_back(graft: Callable[..., Result], expert: Path, tmp_path: Path) -> None:
    """push-expert, pull, rollback: the expert is there, then the old one is."""
    old, new = tmp_path / "old", tmp_path / "new"
    document(graft("pull", "1/2", "-o", old, "--json"))
    receipt = document(graft("push-expert", 1, 2, expert, "--label", "x", "--in-flight", "abort", "--json"))
    assert (receipt["version"], receipt["label"], receipt["experts"]) == ("1", "x", 1)
    pulled = document(graft("pull", "1/2", "-o", new, "--json"))
    assert pulled == {"version": "1", "file": str(new), "nbytes": new.stat().st_size}
    assert parse(new.read_bytes()) == parse(expert.read_bytes())
    assert document(graft("rollback", 0, "--json"))["restores"] == "0"
    graft("pull", "1/2", "-o", new)
    assert new.read_bytes() == old.read_bytes()
    assert graft("rollback", 1).stdout.startswith("version 3 on 2, the weights of 1: ")
    assert "label x" in graft("show", 1).stdout


def test_a_rollback_that_changes_nothing_says_so(graft: Callable[..., Result], expert: Path) -> None:
    """Going back to what is served is a version without a difference; going back further is not."""
    graft("push-expert", 1, 2, expert)
    assert "nothing differed: the engine ran the weights of 1 already" in graft("rollback", 1).stdout
    assert "nothing differed" in graft("show", 2).stdout
    assert "nothing differed" not in graft("rollback", 0).stdout


def test_a_part_of_an_expert_has_to_be_meant(graft: Callable[..., Result], tmp_path: Path) -> None:
    """What is missing is listed; --partial sends it nevertheless."""
    whole = parse(expert_body(3))
    file = tmp_path / "part"
    file.write_bytes(body({"down_proj": whole["down_proj"]}))
    refused = graft("push-expert", 1, 2, file)
    assert refused.exit_code == 4
    assert "  down_proj_bias is missing" in refused.stderr
    assert document(graft("push-expert", 1, 2, file, "--partial", "--json"))["tensors"] == 1


def test_pushing_files_and_folders_is_one_version(
    graft: Callable[..., Result], service: Alive, q_proj: Path, tmp_path: Path
) -> None:
    """A folder's files, as its index lists them, and a file beside: one transaction, one version."""
    found = {name: part for name, part in parts(base_weights()).items() if name != "model.odd"}
    folder = write_checkpoint(tmp_path / "checkpoint", found)
    (folder / "consolidated.safetensors").write_bytes(b"not listed")
    receipt = document(graft("push", folder, q_proj, "--base-version", 0, "--json"))
    assert receipt["version"] == "1"
    assert [one["kind"] for one in receipt["uploads"]] == ["plain"] * 3
    assert service.engine.weights(Q_PROJ).tobytes() == parse(q_proj.read_bytes())[Q_PROJ][2]
    assert graft("status", "--json").stdout.count('"open_transactions":[]') == 1


def test_a_transaction_over_several_commands(
    graft: Callable[..., Result], expert: Path, q_proj: Path
) -> None:
    """begin prints an id for push --transaction; commit applies all of it, abort drops it."""
    id = graft("begin", "--label", "two").stdout.strip()
    assert document(graft("push", q_proj, "--transaction", id, "--json"))["state"] == "open"
    assert "2. expert 1/2" in graft("push-expert", 1, 2, expert, "--transaction", id).stdout
    assert document(graft("versions", "--json"))["current"] == "0"
    assert document(graft("commit", id, "--json"))["label"] == "two"
    assert document(graft("show", "--transaction", id, "--json"))["state"] == "committed"
    other = document(graft("begin", "--expires-in", 60, "--json"))["id"]
    assert f"transaction {other}: aborted" in graft("abort", other).stdout
    late = graft("push", q_proj, "--transaction", other)
    assert (late.exit_code, "transaction_state" in late.stderr) == (5, True)


def test_diff_and_push(graft: Callable[..., Result], service: Alive, tmp_path: Path) -> None:
    """What diff writes is taken by push; equal checkpoints have a status of their own and no file."""
    new = base_weights()
    new[Q_PROJ][3] ^= 1
    folder = write_checkpoint(tmp_path / "new", parts(new))
    batch = tmp_path / "batch.safetensors"
    written = document(graft("diff", service.models / "served", folder, "-o", batch, "--json"))
    assert (written["sparse"], written["dense"], written["elements"]) == (1, 0, 1)
    assert written["nbytes"] == batch.stat().st_size
    assert document(graft("push", batch, "--json"))["uploads"][0]["kind"] == "patches"
    assert service.engine.weights(Q_PROJ).tobytes() == new[Q_PROJ].tobytes()
    none = tmp_path / "none"
    equal = graft("diff", folder, folder, "-o", none)
    assert (equal.exit_code, equal.stderr) == (8, "")
    assert "nothing to push" in equal.stdout
    assert json.loads(graft("diff", folder, folder, "-o", none, "--json").stdout)["file"] is None
    assert not none.exists()
    assert "1 changed in places" in graft("diff", folder, service.models / "served", "-o", batch).stdout


def test_diff_of_other_models_says_why(graft: Callable[..., Result], service: Alive, expert: Path) -> None:
    """Not two states of one model: status 1, the names, and no file."""
    out = expert.parent / "out"
    refused = graft("diff", service.models / "served", expert, "-o", out)
    assert refused.exit_code == 1
    assert "lm_head.weight is only in the old checkpoint" in refused.stderr
    assert [path.name for path in expert.parent.iterdir() if "out" in path.name] == []


def test_reload_and_export(graft: Callable[..., Result], service: Alive, expert: Path) -> None:
    """A reload undoes what was pushed, an export writes what is served; both are followed to their end."""
    graft("push-expert", 1, 2, expert)
    target = service.models / "exported"
    exported = graft("export", 1, target)
    assert (exported.exit_code, "2 of 2 files" in exported.stdout) == (0, True)
    receipt = document(graft("reload", "--base-version", 1, "--json"))
    assert (receipt["version"], receipt["path"]) == ("2", str(service.models / "served"))
    assert document(graft("reload", target, "--json"))["version"] == "3"
    begun = document(graft("export", 3, service.models / "again", "--no-wait", "--json"))
    assert f"operation {begun['id']}: export" in graft("show", "--operation", begun["id"]).stdout


def refused_by_state(service: Alive) -> tuple[str, ...]:
    return ("--base-version", "7")


def nobody(service: Alive) -> tuple[str, ...]:
    return ("--url", "http://127.0.0.1:9")


def no_url(service: Alive) -> tuple[str, ...]:
    return ("--url", "http://127.0.0.1:port")


def unprepared(service: Alive) -> tuple[str, ...]:
    service.engine.faults.prepare[0] = RankError(code=Code.INTERNAL, detail="a fault")
    return ()


def undone(service: Alive) -> tuple[str, ...]:
    service.engine.faults.commit[0] = "middle"
    return ()


def unknown(service: Alive) -> tuple[str, ...]:
    service.engine.faults.commit[0] = "middle"
    service.engine.faults.undo.add(0)
    return ()


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        (refused_by_state, 5, "version_moved"),
        (nobody, 3, "can't be reached"),
        (no_url, 2, "no URL"),
        (unprepared, 6, "prepare_failed"),
        (undone, 6, "commit_undone"),
        (unknown, 7, "state_unknown"),
        (lambda service: ("--in-flight", "soon"), 2, "in-flight"),
        (lambda service: ("--drain-timeout", "-1"), 2, "drain_timeout_s"),
        (lambda service: ("--token-file", "/nowhere/token"), 1, "/nowhere/token"),
    ],
)
def test_statuses_tell_troubles_apart(
    graft: Callable[..., Result],
    service: Alive,
    q_proj: Path,
    fault: Callable[[Alive], tuple[str, ...]],
    status: int,
    said: str,
) -> None:
    """Each kind of trouble has its exit status, a text on stderr and nothing on stdout; also as JSON."""
    options = fault(service)
    ended = graft("push", q_proj, *options)
    assert (ended.exit_code, ended.stdout) == (status, ""), ended.output
    assert said in ended.stderr
    if status not in (2, 7):
        assert json.loads(graft("push", q_proj, *options, "--json").stderr)["exit"] == status


def test_refusals_as_json_are_problem_documents(graft: Callable[..., Result], expert: Path) -> None:
    """Programs get the code, the faults and the exit status."""
    refused = graft("push", expert, "--json")
    problem = json.loads(refused.stderr)
    assert (refused.exit_code, problem["exit"], problem["code"]) == (4, 4, "unknown_tensor")
    assert len(problem["errors"]) == 4


def test_pushing_an_expert_as_a_file_says_how_it_is_done(graft: Callable[..., Result], expert: Path) -> None:
    """The refusal of names without layer and expert points to the command that takes them."""
    refused = graft("push", expert)
    assert refused.exit_code == 4
    assert "`graft push-expert LAYER EXPERT FILE`" in refused.stderr


def test_a_token_is_sent(tmp_path: Path) -> None:
    """From a file or a variable; without it the command is refused with status 4."""
    (tmp_path / "token").write_text("secret\n")
    with alive(tmp_path, token="secret") as service:

        def status(*options: str, **variables: str) -> int:
            env = {"GRAFT_URL": service.url, "GRAFT_TOKEN": None, **variables}
            return CliRunner().invoke(app, ["status", *options], env=env).exit_code

        assert status() == 4
        assert status("--token-file", str(tmp_path / "token")) == 0
        assert status(GRAFT_TOKEN="secret") == 0


def test_help_lists_commands_and_statuses() -> None:
    """Everything that can be done and every exit status stand in --help; each command takes --json."""
    said = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    for text in MEANINGS.values():
        assert text in said
    for command in COMMANDS:
        name = command.__name__.replace("_", "-")
        assert name in said
        if name != "health":
            assert "--json" in CliRunner().invoke(app, [name, "--help"]).stdout, name


def test_words_are_completed() -> None:
    """The shell is told which commands begin so."""
    env = {**os.environ, "_GRAFT_COMPLETE": "complete_bash", "COMP_WORDS": "graft pu", "COMP_CWORD": "1"}
    said = subprocess.run([GRAFT], env=env, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["push-expert", "push", "pull"]


def begun(service: Alive, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """The real command as a process of its own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GRAFT_")}
    command = [GRAFT, *arguments]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, env=env | {"GRAFT_URL": service.url}, **options)


def test_progress_is_for_terminals(service: Alive, q_proj: Path) -> None:
    """Into a pipe nothing but the result is written; a terminal is shown what happens."""
    quiet = begun(service, "push", str(q_proj), "--json")
    out, err = quiet.communicate(timeout=60)
    assert (quiet.returncode, err) == (0, b"")
    assert json.loads(out)["version"] == "1"
    ours, theirs = pty.openpty()
    seen = begun(service, "push", str(q_proj), "--json", stderr=theirs)
    os.close(theirs)
    shown = b""
    while chunk := _read(ours):
        shown += chunk
    assert seen.wait(60) == 0
    assert b"sending q_proj.safetensors" in shown
    assert b"bytes" in shown
    assert b"committing" in shown


def _read(terminal: int) -> bytes:
    """What a terminal shows next; nothing once whoever wrote to it has ended."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""


def test_an_interrupted_push_says_how_it_stands(service: Alive, q_proj: Path) -> None:
    """Ctrl-C while the service commits: status 130, and that it may become a version all the same."""
    hold = asyncio.Event()
    service.engine.faults.hold = hold
    process = begun(service, "push", str(q_proj))
    _until(lambda: "commit" in service.engine.calls)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 130, err
    assert b"could not be aborted, it may still become a version" in err
    service.loop.call_soon_threadsafe(hold.set)
    _until(lambda: service.admin.service.ledger.current.version == 1)


def interrupted(*_: object) -> None:
    """Stands in for waiting at which somebody types Ctrl-C."""
    raise KeyboardInterrupt


def test_an_interrupted_export_is_cancelled(
    graft: Callable[..., Result], service: Alive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while files are written: nothing is left of the export, and it says so."""
    hold = service.engine.faults.hold_read = asyncio.Event()
    monkeypatch.setattr(Client, "wait", interrupted)
    service.loop.call_soon_threadsafe(service.loop.call_later, 0.2, hold.set)
    ended = graft("export", 0, service.models / "out")
    assert (ended.exit_code, ended.stdout) == (130, "")
    assert "the export is cancelled" in ended.stderr
    assert [path.name for path in service.models.iterdir()] == ["served"]


def test_an_export_that_is_done_is_not_said_to_be_cancelled(
    graft: Callable[..., Result], service: Alive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C as it ends: the folder is there, and what is said is how the export ended."""
    wait = Client.wait

    def late(client: Client, *asked: Any) -> None:
        wait(client, *asked)
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "wait", late)
    ended = graft("export", 0, service.models / "out")
    assert (ended.exit_code, ended.stdout) == (130, "")
    assert "cancelled" not in ended.stderr
    assert ": export, done" in ended.stderr
    assert (service.models / "out").is_dir()


def test_an_interrupted_rollback_goes_on(
    graft: Callable[..., Result], service: Alive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while it is waited for: status 130, and where to look for what comes of it."""
    monkeypatch.setattr(Client, "wait", interrupted)
    ended = graft("rollback", 0)
    assert (ended.exit_code, ended.stdout) == (130, "")
    id = ended.stderr.split("--operation ")[1].split("`")[0]
    _until(lambda: service.admin.service.operations.get(id).state == "done")


class Watching:
    """A `graft watch` in a process of its own, and the lines that it has said so far."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.said: list[str] = []
        self._process = process
        self._read = 0
        self._reader = threading.Thread(target=self._listen)
        self._reader.start()

    def until(self, *wanted: str) -> None:
        """Wait for a line with each of these texts, in this order, after those that were waited for."""
        for text in wanted:
            _until(partial(self._hears, text), lambda: f"not among {wanted}: {self.said[self._read :]}")

    def end(self) -> str:
        """Ctrl-C; what it said on stderr."""
        self._process.send_signal(signal.SIGINT)
        assert self._process.wait(60) == 130
        self._reader.join()
        assert self._process.stderr is not None
        return self._process.stderr.read().decode()

    def _hears(self, text: str) -> bool:
        for at in range(self._read, len(self.said)):
            if text in self.said[at]:
                self._read = at + 1
                return True
        return False

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(line.decode().rstrip("\n"))


@pytest.fixture
def watch() -> Iterator[Callable[..., Watching]]:
    """Begins to watch a service; none of it is left after the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def begin(service: Alive, *arguments: str) -> Watching:
        processes.append(begun(service, "watch", *arguments))
        return Watching(processes[-1])

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def test_watching(
    watch: Callable[..., Watching],
    service: Alive,
    graft: Callable[..., Result],
    q_proj: Path,
    expert: Path,
) -> None:
    """The current version and the engine first; then a line for each thing that happens, of every kind."""
    watching = watch(service)
    began = service.admin.service.ledger.get(0).created_at.astimezone()
    watching.until(f"{began:%Y-%m-%d %H:%M:%S}  version      0: base", "engine       writable")
    graft("push", q_proj, "--label", "mine")
    watching.until(
        ": opened",
        "version      1: commit, mine; 1 tensors, 128 bytes; stall 6.0 ms",
        ", mine: committed as version 1",
    )
    id = graft("begin", "--json").stdout
    graft("abort", json.loads(id)["id"])
    watching.until(": aborted")
    service.engine.faults.commit[0] = "before"
    graft("push", q_proj)
    watching.until(": opened", ": failed, commit_undone: ")
    service.engine.faults.commit.clear()
    expert.write_bytes(b"12345678" * 4)
    graft("push-expert", 0, 1, expert)
    watching.until("upload       expert 0/1: refused, header_length")
    httpx.put(f"{service.url}/v1/baselines/good").raise_for_status()
    httpx.delete(f"{service.url}/v1/baselines/good").raise_for_status()
    watching.until("baseline     good: version 1", "baseline     good: gone")
    graft("rollback", 0)
    watching.until("operation    rollback ", "version      2: rollback to 0", ": done as version 2")
    service.admin.line.cuts["*"] = "refused"
    watching.until("engine       not writable: ")
    service.admin.line.cuts.clear()
    watching.until("engine       writable")
    assert watching.end() == "graft: interrupted\n"
    assert not any("receiving" in line or "accepted" in line for line in watching.said)
    told = [line.split(maxsplit=2)[2] for line in watching.said]  # without date and time
    assert [line for line in told if told.count(line) > 1] == ["engine       writable"] * 2


def test_watching_as_json(
    watch: Callable[..., Watching], service: Alive, graft: Callable[..., Result], q_proj: Path
) -> None:
    """Every event of the service as it came, one a line, all types among them."""
    watching = watch(service, "--json")
    watching.until('"type":"reset"')
    graft("push", q_proj)
    httpx.put(f"{service.url}/v1/baselines/good").raise_for_status()
    graft("rollback", 0)
    watching.until('"kind":"rollback"', '"state":"done"')
    watching.end()
    types = {json.loads(line)["type"] for line in watching.said}
    told = {"version", "transaction", "upload", "baseline", "operation", "engine", "storage"}
    assert types == {"reset", *told}


def test_watching_over_a_restart(watch: Callable[..., Watching], tmp_path: Path, q_proj: Path) -> None:
    """That nobody answers is told once; what was committed meanwhile is caught up with, once."""
    with alive(tmp_path) as service:
        watching = watch(service)
        watching.until("version      0: base", "engine       writable")
        with Client(service.url) as client:
            client.patch(Body.of_file(q_proj), label="before")
        watching.until("committed as version 1")
    with alive(tmp_path) as other, Client(other.url) as client:
        client.patch(Body.of_file(q_proj), label="unseen")
    with alive(tmp_path, port=service.port) as again:
        watching.until("version      2: commit, unseen", "engine       writable")
        with Client(again.url) as client:
            client.patch(Body.of_file(q_proj), label="after")
        watching.until("version      3: commit, after")
        err = watching.end()
    assert err.count("can't be reached") == err.count("connected again") == 1
    assert sum("version      " in line for line in watching.said) == 4


def test_watching_with_a_wrong_token(tmp_path: Path) -> None:
    """A refusal ends it with the status of refusals, and is no lost connection."""
    with alive(tmp_path, token="s3cret") as service:
        process = begun(service, "watch")
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (4, b"")
    assert err.startswith(b"graft: unauthorized: ")


def _until(
    condition: Callable[[], object], trouble: Callable[[], str] = lambda: "it did not come about"
) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, trouble()
        time.sleep(0.01)
