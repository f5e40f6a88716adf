"""Processes known again by id and time of start."""

import subprocess
import sys
from pathlib import Path

import pytest

from app.processes import ProcessRecord

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_process_is_known_again(tmp_path: Path) -> None:
    """What was written is read, and tells whether that very process still runs."""
    child = subprocess.Popen(SLEEP, start_new_session=True)
    record = ProcessRecord.of(child.pid, SLEEP)
    record.write(tmp_path / "engine.json")
    found = ProcessRecord.read(tmp_path / "engine.json")
    assert found == record
    assert record.alive
    other = ProcessRecord(child.pid, record.started - 1, record.argv)
    assert not other.alive, "an earlier process of the same id"
    child.kill()
    child.wait()
    assert not record.alive
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine.json"]


def test_only_a_leader_of_its_group_counts() -> None:
    """A process in another's group is not an engine that was started here."""
    child = subprocess.Popen(SLEEP)
    with pytest.raises(ProcessLookupError):
        ProcessRecord.of(child.pid, SLEEP)
    child.kill()
    child.wait()


@pytest.mark.parametrize("content", [None, b"", b"\0" * 100, b"[]", b'{"pid": 1}', b'{"pid": "x"', b"\xff"])
def test_a_damaged_record_is_none(tmp_path: Path, content: bytes | None) -> None:
    """Nothing is adopted on the word of a file that can't be made out."""
    if content is not None:
        (tmp_path / "r").write_bytes(content)
    assert ProcessRecord.read(tmp_path / "r") is None
