"""Failpoints fire once, where they are armed, and never in production."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from loaders.engine.failpoints import Failpoints, Injected


def test_off_without_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files alone arm nothing."""
    monkeypatch.delenv("GRAFT_FAILPOINTS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prepare").touch()
    Failpoints(0).reach("prepare")
    assert (tmp_path / "prepare").exists()


def test_fires_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An armed point raises once; others do not."""
    monkeypatch.setenv("GRAFT_FAILPOINTS", str(tmp_path))
    points = Failpoints(1)
    (tmp_path / "apply.middle").touch()
    points.reach("apply.after")
    with pytest.raises(Injected, match=r"apply\.middle on rank 1"):
        points.reach("apply.middle")
    points.reach("apply.middle")


def test_on_one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A point qualified by a rank fires there alone."""
    monkeypatch.setenv("GRAFT_FAILPOINTS", str(tmp_path))
    (tmp_path / "apply.middle@1").touch()
    Failpoints(0).reach("apply.middle")
    Failpoints(11).reach("apply.middle")
    with pytest.raises(Injected):
        Failpoints(1).reach("apply.middle")


def test_hangs_until_it_is_let_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An armed point can stay where it is; let go, it goes on as if nothing had been."""
    monkeypatch.setenv("GRAFT_FAILPOINTS", str(tmp_path))
    (tmp_path / "prepare").write_text("hang")
    hanging = threading.Thread(target=Failpoints(0).reach, args=("prepare",), daemon=True)
    hanging.start()
    hanging.join(0.2)
    assert hanging.is_alive() and not (tmp_path / "prepare").exists()
    (tmp_path / "go-on").touch()
    hanging.join(10)
    assert not hanging.is_alive()


def test_dies_on_the_spot(tmp_path: Path) -> None:
    """An armed point can end its process as `kill -9` would."""
    (tmp_path / "apply.middle").write_text("die")
    code = "from loaders.engine.failpoints import Failpoints; Failpoints(0).reach('apply.middle')"
    environment = os.environ | {
        "GRAFT_FAILPOINTS": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == -signal.SIGKILL
