"""Kept uploads: how many are read at once."""

import threading
import time
from pathlib import Path

import pytest

from app import blobs
from app.blobs import Blobs
from app.failpoints import Failpoints
from app.ledger import Ledger
from app.settings import Settings
from schemas.bridge import StagedUpload

pytestmark = pytest.mark.anyio


async def test_reading_uploads_leaves_threads_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many files a lineage has, a few are read side by side; all of them are, and in order."""
    lock, now, most = threading.Lock(), 0, 0

    def digest(path: Path) -> str:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.005)
        with lock:
            now -= 1
        return path.name

    monkeypatch.setattr(blobs, "file_digest", digest)
    monkeypatch.setattr(blobs, "_AT_ONCE", 2)
    kept = Blobs(Settings(state_dir=tmp_path), Ledger(), Failpoints())
    lineage = tuple(StagedUpload(path="", nbytes=1, blake3=f"{n:064x}", writes=()) for n in range(30))
    located = await kept.checked(lineage)
    assert [Path(one.path).name for one in located] == [one.blake3 for one in lineage]
    assert most == 2


def test_few_are_a_few() -> None:
    """There is always one, and never more than four."""
    assert 1 <= blobs._AT_ONCE <= 4
