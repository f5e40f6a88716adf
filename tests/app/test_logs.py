"""What is logged: one line per event with its ids, and nothing of what clients or engines confide."""

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.logs import LoggedText, TextLines, begin_logging, bound, console_for, event
from app.settings import LogFormat, Settings
from schemas.dtypes import Dtype
from tests.fakes.admin import OCTETS, Q_PROJ, Admin, bf16, code, expert_body, running, until
from tests.fakes.engine import HIDDEN, FakeEngine
from tests.fakes.safetensors import body

pytestmark = pytest.mark.anyio

TOKEN, SECRET, MARK = "t0ken-of-clients", "s3cret-of-engines", "body-of-a-client"
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What the process logs within the test; pytest's own handlers come back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers = handlers
    root.setLevel(level)


@pytest.fixture
def lines(stream: io.StringIO) -> Lines:
    """Every event so far, at the lowest level."""
    begin_logging(Settings(log_format=LogFormat.JSON, log_level="debug"), stream)
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


def _of(lines: Lines, message: str) -> list[dict[str, Any]]:
    return [line for line in lines() if line["message"] == message]


async def test_answers_carry_the_requests_id(tmp_path: Path) -> None:
    """A client's own id comes back, also with a refusal; without one, or with an odd one, a new one does."""
    async with running(tmp_path, token="t") as admin:
        for path in ("/health/live", "/v1/status", "/nowhere"):
            answer = await admin.http.get(path, headers={"x-request-id": "trace-7/a"})
            assert answer.headers["x-request-id"] == "trace-7/a"
        given = ["", "a b", "x" * 129, 'a"b', "a;b", "\xe9"]
        answers = [
            await admin.http.get("/health/live", headers=[(b"x-request-id", one.encode("latin-1"))])
            for one in given
        ]
        made = {answer.headers["x-request-id"] for answer in answers}
        assert len(made) == len(given)
        assert all(len(one) == 16 and one.isalnum() for one in made)


async def test_a_request_leaves_one_line(tmp_path: Path, lines: Lines) -> None:
    """Method, path, status, bytes received, code of a refusal; polled routes at level debug."""
    async with running(tmp_path) as admin:
        content = expert_body()
        await admin.http.put("/v1/experts/0/0", content=content, headers=OCTETS | {"x-request-id": "r1"})
        await admin.http.post("/v1/rollback", json={"to_version": 9}, headers={"x-request-id": "r2"})
        await admin.http.get("/health/ready", headers={"x-request-id": "r3"})
        upload, refused, polled = (
            next(line for line in _of(lines, "request") if line["request"] == id) for id in ("r1", "r2", "r3")
        )
        assert (upload["method"], upload["path"], upload["status"]) == ("PUT", "/v1/experts/0/0", 200)
        assert (upload["received"], upload["level"]) == (len(content), "info")
        assert (refused["status"], refused["code"]) == (409, "version_not_held")
        assert polled["level"] == "debug"
        assert len(_of(lines, "request")) == 3


async def test_what_a_request_causes_carries_its_ids(tmp_path: Path, lines: Lines) -> None:
    """Opening, upload, commit: request and transaction. A followed commit: its operation as well."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        id = transaction.rpartition("/")[2]
        headers = OCTETS | {"x-request-id": "up"}
        await admin.http.put(f"{transaction}/experts/0/0", content=expert_body(), headers=headers)
        follow = {"x-request-id": "go", "prefer": "respond-async"}
        answer = await admin.http.post(f"{transaction}/commit", headers=follow)
        await until(lambda: _of(lines, "version"))
        assert _of(lines, "transaction opened")[0]["transaction"] == id
        (upload,) = _of(lines, "upload accepted")
        assert (upload["request"], upload["transaction"], upload["kind"]) == ("up", id, "expert")
        (version,) = _of(lines, "version")
        operation = answer.json()["id"]
        assert (version["request"], version["transaction"], version["operation"]) == ("go", id, operation)
        assert (version["version"], version["change"]) == (1, "commit")
        assert version["timing"]["apply_ms"] == 3.0


async def test_a_refused_change_is_logged_with_its_code(tmp_path: Path, lines: Lines) -> None:
    """An operator finds why a commit failed, and of which transaction."""
    async with running(tmp_path) as admin:
        admin.engine.faults.commit[0] = "middle"
        transaction = await admin.open()
        await admin.upload(transaction)
        await admin.http.post(f"{transaction}/commit")
        (refused,) = _of(lines, "change refused")
        assert (refused["code"], refused["level"]) == ("commit_undone", "warning")
        assert refused["transaction"] == transaction.rpartition("/")[2]


async def test_a_bug_is_an_answer_and_a_line_with_its_traceback(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever breaks: 500 `internal` with the id under which the log tells where."""
    async with running(tmp_path) as admin:

        def broken() -> None:
            raise KeyError("a bug")

        monkeypatch.setattr(admin.service.ledger, "records", broken)
        answer = await admin.http.get("/v1/versions", headers={"x-request-id": "b"})
        assert (answer.status_code, code(answer), answer.headers["x-request-id"]) == (500, "internal", "b")
        (broke,) = _of(lines, "a request broke")
        assert broke["request"] == "b"
        assert "in broken" in broke["exception"] and "KeyError" in broke["exception"]


async def _confide(admin: Admin) -> None:
    """Requests of every kind that hold `MARK` wherever a client may put something of its own."""
    http, json_type = admin.http, {"content-type": "application/json"}
    marked = (MARK * 100).encode()
    values = (marked * 2)[: 2 * HIDDEN * HIDDEN]
    good = body({Q_PROJ: (Dtype.BF16, (HIDDEN, HIDDEN), values)}, {"note": MARK})
    shape = (HIDDEN, HIDDEN)
    uploads = [
        good,
        body({MARK: (Dtype.BF16, shape, bf16(1, HIDDEN * HIDDEN))}),
        body({Q_PROJ: (Dtype.BF16, (HIDDEN,), bf16(1, HIDDEN))}, {"patches": f'[{{"name": "{MARK}"}}]'}),
        body({Q_PROJ: (Dtype.BF16, shape, bf16(1, HIDDEN * HIDDEN))}, {"patches": MARK}),
        marked,
        b"\x20" + b"\0" * 7 + marked,
        b"",
    ]
    for upload in uploads:
        for kind in ("application/octet-stream", "text/plain", "application/json"):
            await http.post("/v1/patches", content=upload, headers={"content-type": kind})
            await http.put("/v1/experts/0/0", content=upload, headers={"content-type": kind})
            await http.post("/v1/transactions", content=upload, headers={"content-type": kind})
    for document in ({"label": MARK}, {"in_flight": MARK}, {MARK: 1}, {"base_version": MARK}):
        for path in ("/v1/transactions", "/v1/rollback", "/v1/reload", "/v1/versions/0/export"):
            await http.post(path, json=document)
            await http.post(path, content=json.dumps(document).encode()[:-1], headers=json_type)
    await http.post("/v1/reload", json={"path": f"/{MARK}"})
    await http.get("/v1/status", headers={"cookie": MARK, "user-agent": MARK, "idempotency-key": MARK})
    await http.post("/v1/transactions", json={"label": MARK}, headers={"idempotency-key": MARK})


async def test_no_bodies_tokens_or_secrets_are_logged(
    tmp_path: Path, stream: io.StringIO, lines: Lines
) -> None:
    """At level debug: requests that are taken or refused, right and wrong tokens, bugs in between."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    engine = FakeEngine(secret=SECRET)
    folder = tmp_path / "state"
    async with running(folder, engine=engine, token=TOKEN, engine_secret_file=secret) as admin:
        for token in (TOKEN, f"{TOKEN}-not", ""):
            admin.http.headers["authorization"] = f"Bearer {token}"
            await _confide(admin)
        admin.http.headers["authorization"] = f"Bearer {TOKEN}"
        admin.engine.faults.commit[0] = "middle"
        await _confide(admin)
        admin.service.transactions.check = lambda options: 1 / 0  # type: ignore[assignment]  # a bug
        await _confide(admin)
    statuses = {line["status"] for line in _of(lines, "request")}
    assert {200, 201, 401, 415, 422, 500, 503} <= statuses
    for hidden in (TOKEN, SECRET, MARK, "body-of"):
        assert hidden not in stream.getvalue()


def test_standard_output_can_go_to_the_log(lines: Lines, capsys: pytest.CaptureFixture[str]) -> None:
    """With `json`, what is said to a person is an event, line by line; blank lines are none."""
    console = console_for(Settings(log_format=LogFormat.JSON))
    console.print("admin: http://127.0.0.1:8001\n\n[1/2] " + "long " * 100, markup=False, soft_wrap=True)
    assert [line["message"] for line in lines()] == ["admin: http://127.0.0.1:8001", "[1/2] " + "long " * 100]
    assert capsys.readouterr().out == ""
    assert not isinstance(console_for(Settings()).file, LoggedText)


def test_json_unless_a_terminal_reads(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` follows the stream; `json` and `text` do not."""

    def logged(format: LogFormat, terminal: bool) -> str:
        out = io.StringIO()
        monkeypatch.setattr(out, "isatty", lambda: terminal, raising=False)
        begin_logging(Settings(log_format=format), out)
        event(logging.getLogger("x"), logging.INFO, "said", number=1)
        logging.getLogger("x").debug("not at level info")
        return out.getvalue()

    for format, terminal, as_json in (
        (LogFormat.AUTO, True, False),
        (LogFormat.AUTO, False, True),
        (LogFormat.JSON, True, True),
        (LogFormat.TEXT, False, False),
    ):
        line = logged(format, terminal)
        assert line.startswith("{") == as_json, (format, terminal)
        assert line.count("\n") == 1 and "said" in line


def test_an_event_is_one_line_whatever_it_holds(lines: Lines) -> None:
    """Newlines, quotes, lone surrogates and things that are not JSON do not break the form."""
    with bound(request="r", path=Path("/a")):
        event(logging.getLogger("x"), logging.ERROR, 'a\n"b"\ud800', folder=Path("/c"))
    (line,) = lines()
    assert (line["message"], line["path"], line["folder"]) == ('a\n"b"\ud800', "/a", "/c")
    assert line["time"].endswith("+00:00")


def test_text_has_the_same_and_tracebacks_to_read() -> None:
    """For a terminal: fields as key=value, exceptions below."""
    try:
        raise ValueError("v")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "broke %s", ("it",), sys.exc_info())
    record.graft_bound = {"request": "r"}
    first, *rest = TextLines().format(record).splitlines()
    assert first.endswith('error x: broke it request="r"')
    assert rest[0].startswith("Traceback") and rest[-1] == "ValueError: v"


def test_questions_to_the_engine_are_not_logged(lines: Lines) -> None:
    """httpx would log each poll with its address."""
    transport = httpx.MockTransport(lambda request: httpx.Response(200))
    httpx.Client(transport=transport).get("http://engine/state")
    assert lines() == []
