"""Staged files become durable together."""

import errno
import os
from pathlib import Path

import pytest

from loaders.staged import fsync_all
from schemas.problems import Code, ProblemError
from tests.loaders.bodies import body, f32, staged


def test_files_and_folders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is synced, then each folder once, so that the names survive too."""
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()))
    (tmp_path / "more").mkdir()
    files = [staged(tmp_path, body({"w": f32(n)})) for n in (1, 2)]
    files.append(staged(tmp_path / "more", body({"w": f32(3)})))
    fsync_all(files)
    assert synced == [*(file.path for file in files), tmp_path, tmp_path / "more"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_found_full_at_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A file system that allocates late reports a full disk here; it is refused as such."""

    def full(descriptor: int) -> None:
        raise OSError(code, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ProblemError) as refusal:
        fsync_all([staged(tmp_path, body({}))])
    assert refusal.value.code is Code.DISK_FULL


def test_unlink_twice(tmp_path: Path) -> None:
    """Removing a file that is gone is fine."""
    file = staged(tmp_path, body({}))
    file.unlink()
    file.unlink()
    assert list(tmp_path.iterdir()) == []
