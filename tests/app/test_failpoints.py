"""The admin's failpoints fire once, where they are armed, and never in production."""

import subprocess
import sys
from pathlib import Path

import pytest

from app.failpoints import STATUS, Failpoints


def test_off_without_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file alone arms nothing."""
    monkeypatch.delenv("GRAFT_FAILPOINTS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text("full")
    Failpoints().reach("x")
    assert (tmp_path / "x").exists()


def test_a_full_disk_comes_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The armed point raises, others and the next time do not."""
    monkeypatch.setenv("GRAFT_FAILPOINTS", str(tmp_path))
    (tmp_path / "x").write_text("full")
    points = Failpoints()
    points.reach("y")
    with pytest.raises(OSError, match="failpoint x"):
        points.reach("x")
    points.reach("x")


@pytest.mark.parametrize(
    ("words", "me", "other"), [("kill", 1, 0), ("kill {}", 0, 1), ("kill {} self", 1, 1)]
)
def test_who_dies(tmp_path: Path, words: str, me: int, other: int) -> None:
    """The process itself, another one that a file names, or both."""
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (tmp_path / "pid").write_text(str(victim.pid))
    folder = tmp_path / "armed"
    folder.mkdir()
    (folder / "x").write_text(words.format(tmp_path / "pid"))
    code = "from app.failpoints import Failpoints; Failpoints().reach('x')"
    env = {"GRAFT_FAILPOINTS": str(folder), "PYTHONPATH": str(Path(__file__).parents[2])}
    status = subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode
    assert status == (STATUS if me else 0)
    if not other:
        assert victim.poll() is None
        victim.kill()
    assert victim.wait() == -9
