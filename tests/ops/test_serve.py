"""`graft serve` as a process, with a stand-in for vLLM as its child."""

import json
import os
import re
import signal
import time
from pathlib import Path

import httpx
import pytest

from app.serve import ADMIN_GRACE_S, ENGINE_GRACE_S, LAST_GRACE_S
from app.state_folder import StateFolderError, claimed
from tests.fakes.admin import expert_body
from tests.ops.served import Serve, Served, fake_engine

pytestmark = pytest.mark.slow

SLOW = "import time; print('INFO 1 2 [x.py:3] loading weights', flush=True); time.sleep(300)"
BROKEN = "import sys; print('no such model: m', flush=True); sys.exit(3)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SLOW


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def loading(serve_shared: Serve) -> Served:
    """A service whose engine loads for ever; it has a token, and its engine says what it was given."""
    code = (
        "import os; p = os.environ['GRAFT_ENGINE_SECRET_FILE'];"
        "print('mode', oct(os.stat(p).st_mode & 0o777), os.environ.get('GRAFT_TOKEN'), flush=True);"
    )
    return serve_shared(code + SLOW, "m", "--engine-port", "0", GRAFT_TOKEN="t")


def test_progress_is_said_in_plain_lines(loading: Served) -> None:
    """Without a terminal, what the engine logs appears as lines, and in the status."""
    loading.wait_for(r"starting the engine, \d+ s: loading weights")
    status = httpx.get(f"{loading.admin}/v1/status", headers={"Authorization": "Bearer t"}).json()
    assert status["engine"]["progress"]["detail"] == "loading weights"


def test_each_line_as_json(serve: Serve) -> None:
    """With --json, what a person would read is said in JSON objects, with their time."""
    served = serve(SLOW, "m", "--engine-port", "0", "--json", GRAFT_LOG_LEVEL="error")
    served.wait_for("loading weights")
    said = [json.loads(line) for line in served.said.splitlines()]
    assert all(one.keys() == {"at", "text"} for one in said)
    assert any(one["text"].startswith("admin: http://") for one in said)


def test_the_engine_gets_its_secret_by_a_private_file(loading: Served) -> None:
    """The file named in the engine's environment is private, and the admin's token is not passed on."""
    loading.wait_for("loading weights")
    assert "mode 0o600 None" in (loading.state / "engine.log").read_text()
    assert loading.state.stat().st_mode & 0o777 == 0o700
    assert httpx.get(f"{loading.admin}/v1/status").status_code == 401


def test_not_ready_while_the_engine_loads(loading: Served) -> None:
    """Alive needs no token and says nothing of the engine; ready is refused with its code."""
    assert httpx.get(f"{loading.admin}/health/live").status_code == 200
    ready = httpx.get(f"{loading.admin}/health/ready", headers={"Authorization": "Bearer t"})
    assert (ready.status_code, ready.json()["code"]) == (503, "engine_unavailable")


def test_live_answers_within_three_seconds(serve: Serve) -> None:
    """The admin is up long before any engine could be; the best of three starts counts."""
    times = []
    for _ in range(3):
        begun = time.monotonic()
        served = serve(SLOW, "m", "--engine-port", "0")
        assert httpx.get(f"{served.admin}/health/live").status_code == 200
        times.append(time.monotonic() - begun)
        if min(times) < 3:
            return
        served.process.terminate()
        served.process.wait(60)
    raise AssertionError(f"alive after {times} s")


def test_the_end_fits_into_a_minute() -> None:
    """What admin and engine are given to end, one after the other, is less than that."""
    assert ADMIN_GRACE_S + ENGINE_GRACE_S + LAST_GRACE_S < 55


def test_a_signal_ends_service_and_engine(serve: Serve) -> None:
    """The foreground process ends with status 0 and leaves no engine behind."""
    served = serve(SLOW, "m", "--engine-port", "0")
    pid = served.engine_pid
    assert _alive(pid)
    served.process.terminate()
    assert served.process.wait(60) == 0
    assert not _alive(pid)


def test_an_engine_that_ignores_the_end_is_killed(serve: Serve) -> None:
    """The whole thing is over within a minute even if vLLM does not react."""
    served = serve(STUBBORN, "m", "--engine-port", "0")
    pid = served.engine_pid
    served.wait_for("loading weights")
    served.process.terminate()
    served.process.wait(60)
    assert not _alive(pid)


def test_a_commit_that_hangs_does_not_hold_up_the_end(serve: Serve, free_port: int) -> None:
    """An engine that never answers a commit: its wait is over when the engine is, and the service ends."""
    engine = fake_engine("engine.faults.hold = asyncio.Event()")
    served = serve(engine, "m", "--engine-port", str(free_port))
    served.wait_for("# roll back")
    body = (served.state / "examples" / "expert.safetensors").read_bytes()
    binary = {"Content-Type": "application/octet-stream"}
    with pytest.raises(httpx.TimeoutException):
        httpx.put(f"{served.admin}/v1/experts/0/0", content=body, headers=binary, timeout=1)
    pid = served.engine_pid
    served.process.terminate()
    assert served.process.wait(60) == 0
    assert not _alive(pid)


def test_a_stream_of_events_is_ended_whole(serve: Serve) -> None:
    """A reader that follows the events gets the end of its stream, not a cut connection."""
    served = serve(SLOW, "m", "--engine-port", "0")
    with httpx.stream("GET", f"{served.admin}/v1/events", timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("retry:")
        served.process.terminate()
        assert "event: reset" in list(lines)
    assert served.process.wait(60) == 0


def test_a_failed_start_ends_with_the_engines_last_words(serve: Serve) -> None:
    """An engine that cannot start ends the service: non-zero, with the end of its log."""
    served = serve(BROKEN, "m", "--engine-port", "0")
    assert served.process.wait(60) == 1
    assert "the engine ended with status 3" in served.said
    assert "no such model: m" in served.said
    assert "Traceback" not in served.said


def test_an_engine_that_dies_ends_the_service(serve: Serve) -> None:
    """A killed engine is not papered over: non-zero status, naming the signal's status."""
    served = serve(SLOW, "m", "--engine-port", "0")
    served.wait_for("loading weights")
    os.kill(served.engine_pid, signal.SIGKILL)
    assert served.process.wait(60) == 1
    assert "the engine ended with status -9" in served.said


def _commit(served: Served, seed: int) -> str:
    """Upload an expert; the version that it makes."""
    binary = {"Content-Type": "application/octet-stream"}
    answer = httpx.put(
        f"{served.admin}/v1/experts/0/0", content=expert_body(seed), headers=binary, timeout=30
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["version"])


def _digests(served: Served) -> object:
    ranks = httpx.get(f"{served.admin}/v1/digests", timeout=30).json()["ranks"]
    return [rank["tensors"] for rank in ranks]


def test_an_engine_that_dies_is_started_again_and_replayed(serve: Serve, free_port: int) -> None:
    """After the first good start a dead engine is replaced, and serves the weights that were acknowledged."""
    served = serve(fake_engine(), "m", "--engine-port", str(free_port))
    served.wait_for("# roll back")
    assert _commit(served, 1) == "1"
    digests, pid = _digests(served), served.engine_pid
    os.killpg(pid, signal.SIGKILL)
    served.wait_for(r"ready again at version 1")
    assert _digests(served) == digests
    assert _commit(served, 2) == "2"
    served.process.terminate()
    assert served.process.wait(60) == 0


def test_an_engine_that_keeps_dying_ends_the_service(serve: Serve, free_port: int) -> None:
    """Restarts are bounded (here by two): then the service ends, non-zero, and says why."""
    served = serve(fake_engine(), "m", "--engine-port", str(free_port))
    served.wait_for("# roll back")
    for count in range(3):
        pids = [int(pid) for pid in re.findall(r"engine: process (\d+)", served.said)]
        assert len(pids) == count + 1
        os.killpg(pids[-1], signal.SIGKILL)
        if count < 2:
            served.wait_for(rf"(?s)(ready again.*){{{count + 1}}}")
    assert served.process.wait(60) == 1
    assert served.said.count("the engine ended with status -9") == 3


def test_an_engine_of_unknown_state_is_replaced(serve: Serve, free_port: int) -> None:
    """A commit that could not be undone costs the engine, not the service."""
    broken = "engine.faults.undo.add(0) if not os.path.exists('once') else None"
    code = f"os.chdir(os.path.dirname(os.environ['GRAFT_ENGINE_SECRET_FILE']));{broken};open('once', 'w');"
    code += "engine.faults.commit.update({0: 'middle'} if engine.faults.undo else {})"
    served = serve(fake_engine(code), "m", "--engine-port", str(free_port))
    served.wait_for("# roll back")
    binary = {"Content-Type": "application/octet-stream"}
    answer = httpx.put(f"{served.admin}/v1/experts/0/0", content=expert_body(1), headers=binary, timeout=30)
    assert (answer.status_code, answer.json()["code"]) == (500, "state_unknown")
    served.wait_for("ready again at version 0")
    assert _commit(served, 2) == "1"


def test_an_engine_that_hangs_is_replaced(serve: Serve, free_port: int) -> None:
    """An engine that runs but answers nothing is killed and replayed, also if no signal reaches it."""
    bounds = {"GRAFT_ENGINE_HANG_S": "1", "GRAFT_ENGINE_ANSWER_S": "0.5"}
    served = serve(fake_engine(), "m", "--engine-port", str(free_port), **bounds)
    served.wait_for("# roll back")
    assert _commit(served, 1) == "1"
    digests, pid = _digests(served), served.engine_pid
    os.kill(pid, signal.SIGSTOP)
    served.wait_for("the engine has answered nothing for")
    served.wait_for("ready again at version 1")
    assert not _alive(pid)
    assert _digests(served) == digests
    assert _commit(served, 2) == "2"


def test_an_engine_that_outlives_its_admin_is_adopted(serve: Serve, free_port: int) -> None:
    """A killed admin comes back to the same engine, which has not stopped serving."""
    first = serve(fake_engine(), "m", "--engine-port", str(free_port))
    first.wait_for("# roll back")
    assert _commit(first, 1) == "1"
    digests, pid = _digests(first), first.engine_pid
    first.process.kill()
    first.process.wait(60)
    second = serve(fake_engine(), "m", "--engine-port", str(free_port))
    second.wait_for("ready again at version 1")
    assert second.engine_pid == pid
    assert "taken over" in second.said
    assert _digests(second) == digests
    assert _commit(second, 2) == "2"
    os.killpg(pid, signal.SIGKILL)
    second.wait_for("ready again at version 2")
    second.process.terminate()
    assert second.process.wait(60) == 0


def test_a_left_engine_of_another_command_is_ended(serve: Serve, free_port: int) -> None:
    """With another model a new engine is started; the old one is not left behind."""
    first = serve(fake_engine(), "m", "--engine-port", str(free_port))
    first.wait_for("# roll back")
    pid = first.engine_pid
    first.process.kill()
    first.process.wait(60)
    second = serve(fake_engine(), "another", "--engine-port", str(free_port))
    second.wait_for("# roll back")
    assert second.engine_pid != pid
    assert not _alive(pid)


def test_a_state_folder_belongs_to_one_admin(serve: Serve) -> None:
    """A second admin on the same folder is refused while the first runs, and not after it was killed."""
    first = serve(SLOW, "m", "--engine-port", "0")
    pid = first.engine_pid
    with pytest.raises(StateFolderError, match="another admin process"), claimed(first.state):
        pass
    first.process.kill()
    os.killpg(pid, signal.SIGKILL)
    first.process.wait(60)
    with claimed(first.state):
        pass


def test_attached_to_an_engine_that_is_not_there(serve: Serve, tmp_path: Path) -> None:
    """Attached mode starts no engine: it is alive, says what it waits for, and ends on a signal."""
    secret = tmp_path / "secret"
    secret.write_text("s")
    served = serve(SLOW, "--engine", "http://127.0.0.1:9", "--engine-secret-file", str(secret))
    assert httpx.get(f"{served.admin}/health/ready").json()["code"] == "engine_unavailable"
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(60) == 0
    assert "engine: http://127.0.0.1:9 (attached)" in served.said
    assert not (served.state / "engine.log").exists()
