"""Real processes on a real disk without room: refused or made, nothing lost, and then it goes on."""

import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.crash.disk import SmallDisk
from tests.crash.fake import FakeEngineRig
from tests.crash.processes import Forked
from tests.crash.trial import Trial
from tests.fakes.admin import expert_parts
from tests.fakes.safetensors import body

pytestmark = pytest.mark.slow

PAGE = 4096
LIMIT = 3 << 20
"""More than the ledger's files have here, less than a large upload."""


def large(number: int, nbytes: int) -> bytes:
    """An expert whose file is at least so large; more of it than fits can arrive."""
    return body(expert_parts(number), {"padding": "x" * nbytes})


class LimitedRig(FakeEngineRig):
    """Its admin may not write files larger than `LIMIT`: the kernel takes a part of a write, then none."""

    def start_admin(self) -> None:
        """With the limit, which children inherit."""
        super().start_admin()
        assert isinstance(self._admin, Forked)
        resource.prlimit(self._admin.target, resource.RLIMIT_FSIZE, (LIMIT, LIMIT))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[FakeEngineRig]:
    """Both processes, not started."""
    rig = FakeEngineRig(tmp_path / "rig")
    yield rig
    rig.close()


@pytest.fixture
def disk(rig: FakeEngineRig) -> Iterator[SmallDisk]:
    """The disk of the rig's state folder: two megabytes."""
    try:
        disk = SmallDisk(rig.folder / "state", 2 << 20)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("nothing can be mounted here; the tests of limited files and the failpoints remain")
    yield disk
    rig.close()
    disk.close()


def test_a_write_that_is_taken_in_part(tmp_path: Path) -> None:
    """An upload that the kernel takes a part of is 507; nothing stays of it, and others are committed."""
    rig = LimitedRig(tmp_path / "rig")
    try:
        trial = Trial(rig)
        trial.change(trial.uploaded(1), nullcontext())
        answer = rig.ask("PUT", "/v1/experts/0/0", content=large(2, LIMIT + PAGE))
        assert answer is not None
        assert (answer.status_code, answer.json()["code"]) == (507, "disk_full")
        assert not list((rig.folder / "state" / "staged").rglob("*.safetensors"))
        trial.agree()
        trial.change(trial.uploaded(3), nullcontext())
        trial.agree()
        assert trial.model.current == 2
    finally:
        rig.close()


def test_a_disk_that_fills_up(rig: FakeEngineRig, disk: SmallDisk) -> None:
    """From no room at all to enough for a commit: 507 or made, and the engine never stays paused."""
    trial = Trial(rig)
    statuses = []
    for pages in range(0, 64, 2):
        number = next(rig.numbers)
        ask = trial.uploaded(number)
        answer = trial.change(ask, disk.full(but=pages * PAGE))
        assert answer is not None
        statuses.append(answer.status_code)
        if answer.status_code != 200:
            assert (answer.status_code, answer.json()["code"]) == (507, "disk_full")
        assert not rig.bridge("GET", "state").json()["paused"]
        trial.agree()
        if statuses[-3:] == [200] * 3:
            break
    assert statuses[0] == 507 and statuses[-1] == 200
    rig.kill("admin")
    rig.kill("engine")
    rig.revive()
    trial.agree()


def test_a_body_that_does_not_fit(rig: FakeEngineRig, disk: SmallDisk) -> None:
    """507 for a body larger than what is left, which is free again then; transactions go on."""
    trial = Trial(rig)
    free = disk.free()
    answer = rig.ask("PUT", "/v1/experts/0/0", content=large(1, free))
    assert answer is not None
    assert (answer.status_code, answer.json()["code"]) == (507, "disk_full")
    assert disk.free() > free - 16 * PAGE
    trial.change(trial.uploaded(2), nullcontext())
    trial.agree()


def test_a_reload_without_room(rig: FakeEngineRig, disk: SmallDisk) -> None:
    """507 and the old weights; later the same request makes a version."""
    trial = Trial(rig)
    answer = trial.change(trial.reloaded(1), disk.full())
    assert answer is not None
    assert (answer.status_code, answer.json()["code"]) == (507, "disk_full")
    trial.agree()


def test_a_first_start_without_room(rig: FakeEngineRig, disk: SmallDisk) -> None:
    """One line that says so and a status other than 0; with room the same start works."""
    with disk.full():
        rig.start()
        log = max(rig.folder.glob("admin*.log")).read_text()
        assert rig.admin_status() == 1
        assert re.fullmatch(r"no token is set.*\ngraft: .*no room left on the disk.*\n", log), log
    rig.revive()
    assert rig.wait_ready() == "0"


def test_a_first_start_whose_ledger_finds_no_room(rig: FakeEngineRig) -> None:
    """The same without a disk of its own."""
    (rig.armed / "ledger.create").write_text("full")
    rig.start()
    log = max(rig.folder.glob("admin*.log")).read_text()
    assert (rig.admin_status(), log.count("\n")) == (1, 2) and "no room left on the disk" in log
    rig.revive()
    assert rig.wait_ready() == "0"
