"""What a large upload costs the receiving process; a gigabyte is sent, so not among the quick tests."""

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
NBYTES = 1024 * MIB


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """The tiny app under uvicorn in a process of its own; its process id and port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "--factory", "tests.app.receiver:create_app"]
    child = subprocess.Popen(
        [*command, "--port", str(port), "--log-level", "warning"],
        env={**os.environ, "RECEIVER_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
    )
    try:
        for _ in range(300):
            try:
                _live_seconds(port)
                break
            except OSError:
                time.sleep(0.05)
        yield child.pid, port
    finally:
        child.terminate()
        child.wait(10)
        for path in tmp_path.iterdir():
            path.unlink()


@pytest.mark.big
def test_gigabyte_costs_little_memory_and_keeps_answering(
    receiver: tuple[int, int],
) -> None:
    """1 GiB raises the peak memory by less than 64 MiB, and /health/live answers within 100 ms meanwhile."""
    pid, port = receiver
    before = _peak_nbytes(pid)
    pauses: list[float] = []
    done = threading.Event()

    def poll() -> None:
        while not done.wait(0.02):
            pauses.append(_live_seconds(port))

    watcher = threading.Thread(target=poll)
    watcher.start()
    try:
        status, answer = _upload(port)
    finally:
        done.set()
        watcher.join()
    assert (status, answer["nbytes"]) == (201, NBYTES + len(_head()))
    assert Path(answer["path"]).stat().st_size == answer["nbytes"]
    assert _peak_nbytes(pid) - before < 64 * MIB
    assert len(pauses) > 20
    assert sorted(pauses)[len(pauses) * 99 // 100] < 0.1  # one in a hundred may be the machine's doing


def _upload(port: int) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    piece = bytes(MIB)
    connection.putrequest("POST", "/upload")
    connection.putheader("Content-Type", "application/octet-stream")
    connection.putheader("Content-Length", str(NBYTES + len(_head())))
    connection.endheaders(_head())
    for _ in range(NBYTES // MIB):
        connection.send(piece)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def _head() -> bytes:
    entry = {"dtype": "U8", "shape": [NBYTES], "data_offsets": [0, NBYTES]}
    header = json.dumps({"w": entry}).encode()
    return len(header).to_bytes(8, "little") + header


def _live_seconds(port: int) -> float:
    """Seconds that one question to /health/live takes, connecting included."""
    begin = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", "/health/live")
    assert connection.getresponse().read() == b"live"
    connection.close()
    return time.monotonic() - begin


def _peak_nbytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
