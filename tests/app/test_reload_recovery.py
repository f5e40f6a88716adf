"""A reload among the history's versions: brought back from its folder, or not at all if that has changed."""

import shutil
from pathlib import Path

import pytest

from tests.app.test_operations import ended
from tests.app.test_recovery import blobs, ready
from tests.app.test_reload import changed, reload
from tests.app.test_rollback import bits, held, roll
from tests.fakes.admin import Admin, asleep, code, running, until
from tests.fakes.checkpoint import FILES, write_checkpoint
from tests.fakes.engine import FakeEngine, Line

pytestmark = pytest.mark.anyio

WHOLE = 5000
"""More undo bytes than the fake model has bytes, and less than twice as many."""


def loaded(root: Path) -> tuple[FakeEngine, Path]:
    """An engine on one checkpoint folder, and another folder to reload."""
    base = write_checkpoint(root / "models" / "served")
    return FakeEngine(ranks=2, base=base), write_checkpoint(root / "models" / "other", changed())


async def replayed(admin: Admin) -> None:
    """A new engine that was brought to the current version."""
    admin.engine.restart()
    await until(lambda: admin.engine.ranks[0].version > 0 and not admin.service.link.problem)


@pytest.mark.parametrize("admin_too", [False, True])
async def test_a_reload_is_replayed_from_its_folder(tmp_path: Path, admin_too: bool) -> None:
    """Nothing before it is sent, what was committed after it is; its files are read where they lie."""
    engine, other = loaded(tmp_path)
    async with running(tmp_path / "state", engine=engine) as admin:
        await admin.commit(seed=1)
        assert (await reload(admin, other)).json()["version"] == "2"
        await admin.commit(seed=2)
        expected = bits(engine)
        lineage = admin.service.ledger.lineage(3)
        assert lineage is not None
        assert [Path(one.path).name for one in lineage][:2] == list(FILES)
        assert len(lineage) == 3
        assert len(blobs(admin)) == 2
        if not admin_too:
            await replayed(admin)
    if admin_too:
        engine.restart()
    async with running(tmp_path / "state", engine=engine) as admin:
        assert (await ready(admin), bits(engine) == expected) == ("3", True)
        entry = (await admin.http.get("/v1/versions/2")).json()
        assert (entry["kind"], entry["path"], entry["held"]) == ("reload", str(other), True)
        assert (await reload(admin)).json()["path"] == str(other)


@pytest.mark.parametrize("damage", ["values", "gone"])
async def test_a_folder_that_changed_is_not_served_for_the_old_one(tmp_path: Path, damage: str) -> None:
    """Other values or none in a reload's files: base_changed and nothing written, until they are back."""
    engine, other = loaded(tmp_path)
    base = bits(engine)
    async with running(tmp_path / "state", engine=engine) as admin:
        await reload(admin, other)
        expected = bits(engine)
        shutil.copytree(other, tmp_path / "old")
        if damage == "values":
            write_checkpoint(other, changed(7))
        else:
            (other / FILES[1]).unlink()
        engine.restart()
        await until(lambda: admin.service.link.refusal and admin.settled)
        answer = await admin.http.get("/health/ready")
        assert code(answer) == "base_changed"
        assert str(other) in answer.json()["detail"]
        assert code(await admin.http.post("/v1/transactions")) == "base_changed"
        assert bits(engine) == base
        shutil.copytree(tmp_path / "old", other, dirs_exist_ok=True)
        await replayed(admin)
        assert bits(engine) == expected


async def test_rollback_past_the_undo_of_a_reload(tmp_path: Path) -> None:
    """Before it, to it and after it: each from the files that it consists of."""
    engine, other = loaded(tmp_path)
    async with running(tmp_path / "state", engine=engine, undo_bytes=WHOLE) as admin:
        states = [bits(engine)]
        await admin.commit(seed=1)
        states.append(bits(engine))
        await reload(admin, other)
        states.append(bits(engine))
        await admin.commit(seed=2)
        states.append(bits(engine))
        await replayed(admin)
        assert await held(admin) == ["0", "1", "2", "3"]
        for target in (1, 3, 0, 2):
            await admin.service.client.forget([admin.service.ledger.current.version])
            assert await roll(admin, target) == 200
            assert bits(engine) == states[target]


async def test_rollback_to_a_reload_whose_files_changed(tmp_path: Path) -> None:
    """Without undo it is base_changed and changes nothing; the service goes on."""
    engine, other = loaded(tmp_path)
    async with running(tmp_path / "state", engine=engine) as admin:
        await reload(admin, other)
        await roll(admin, 0)
        await replayed(admin)
        before = bits(engine)
        write_checkpoint(other, changed(7))
        assert code(await admin.http.post("/v1/rollback", json={"to_version": 1})) == "base_changed"
        assert (await ready(admin), bits(engine) == before) == ("2", True)
        assert (await admin.commit()).status_code == 200


@pytest.mark.parametrize("admin_too", [False, True])
async def test_a_base_that_was_written_over_is_not_gone_back_to(tmp_path: Path, admin_too: bool) -> None:
    """Reloaded from the base's own folder: version 0 can be had by undo, but not from the files any more."""
    engine, _ = loaded(tmp_path)
    async with running(tmp_path / "state", engine=engine) as admin:
        before = bits(engine)
        assert engine.base is not None
        write_checkpoint(engine.base, changed(7))
        await reload(admin)
        await roll(admin, 0)
        assert bits(engine) == before
        await roll(admin, 1)
        after = bits(engine)
        if not admin_too:
            await admin.service.client.forget([1, 2, 3])
            assert code(await admin.http.post("/v1/rollback", json={"to_version": 0})) == "base_changed"
            assert (await ready(admin), bits(engine) == after) == ("3", True)
    async with running(tmp_path / "state", engine=engine) as admin:
        await admin.service.client.forget([1, 2, 3])
        assert code(await admin.http.post("/v1/rollback", json={"to_version": 0})) == "version_not_held"
        assert (await ready(admin), bits(engine) == after) == ("3", True)


async def test_a_reload_of_the_bases_own_folder_outlives_the_old_base(tmp_path: Path) -> None:
    """An engine loaded from the new files is brought to that version; what needs the old ones is not held."""
    engine, _ = loaded(tmp_path)
    async with running(tmp_path / "state", engine=engine) as admin:
        assert engine.base is not None
        await admin.commit(seed=1)
        write_checkpoint(engine.base, changed(7))
        await reload(admin)
        after = bits(engine)
        link, digests = admin.service.link, admin.service.recovery._digests
        assert await digests.verify(link.require(), 2)  # and they are recorded
        await replayed(admin)
        assert (await ready(admin), bits(engine) == after) == ("2", True)
        assert await held(admin) == ["2"]
        write_checkpoint(engine.base, changed(9))
        engine.restart()
        await until(lambda: link.refusal and admin.settled)
        assert await ready(admin) == "base_changed"


@pytest.mark.parametrize("answer", ["after", "before"])
async def test_a_reload_in_doubt_is_settled(tmp_path: Path, answer: str) -> None:
    """The admin dies before it is written down: all of it is known to the next, or nothing was done."""
    engine, other = loaded(tmp_path)
    line = Line(engine)
    async with asleep(tmp_path / "state", line, engine_settle_s=0.2) as admin:
        await until(lambda: admin.settled)
        line.cuts, line.then = {"commit": answer}, "refused"
        options = {"label": "new", "in_flight": "wait", "drain_timeout_s": 0.1}
        assert (await reload(admin, other, **options)).status_code == 500
        intent = admin.service.journal.intent
        assert intent is not None
        assert (intent.flight.in_flight, intent.flight.drain_timeout_s) == ("wait", 0.1)
    async with running(tmp_path / "state", engine=engine, engine_settle_s=0.4) as admin:
        entry = (await admin.http.get("/v1/versions/current")).json()
        if answer == "before":
            assert (entry["version"], await ready(admin)) == ("0", "0")
            return
        assert (entry["kind"], entry["path"], entry["label"]) == ("reload", str(other), "new")
        expected = bits(engine)
        await replayed(admin)
        assert bits(engine) == expected


async def test_a_reload_can_be_followed(tmp_path: Path) -> None:
    """With Prefer: respond-async it is an operation, whose receipt is there after a restart, too."""
    engine, other = loaded(tmp_path)
    async with running(tmp_path / "state", engine=engine) as admin:
        headers = {"prefer": "respond-async"}
        begun = await admin.http.post("/v1/reload", json={"path": str(other)}, headers=headers)
        assert (begun.status_code, begun.json()["kind"]) == (202, "reload")
        operation = await ended(admin, begun.headers["location"])
        assert (operation["state"], operation["receipt"]["path"]) == ("done", str(other))
    async with running(tmp_path / "state", engine=engine) as admin:
        assert (await admin.http.get(begun.headers["location"])).json() == operation


async def test_exports_are_remembered(tmp_path: Path) -> None:
    """How an export ended, and what it wrote, is known after a restart."""
    engine, _ = loaded(tmp_path)
    async with running(tmp_path / "state", engine=engine) as admin:
        target = tmp_path / "models" / "out"
        begun = await admin.http.post("/v1/versions/0/export", json={"path": str(target)})
        operation = await ended(admin, begun.headers["location"])
        assert (operation["state"], operation["export"]["files"]) == ("done", 2)
    async with running(tmp_path / "state", engine=engine) as admin:
        assert (await admin.http.get(begun.headers["location"])).json() == operation
