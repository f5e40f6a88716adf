"""Failpoints fire once, where they are armed, and never in production."""

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
