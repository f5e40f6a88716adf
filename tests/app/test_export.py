"""Export: the weights of a version as a checkpoint folder, complete or not there at all."""

import asyncio
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loaders.folder import CheckpointFolder
from loaders.header import Header, HeaderLimits
from schemas.problems import Code
from tests.fakes.admin import OCTETS, Q_PROJ, Admin, code, q_proj_body, running, until
from tests.fakes.checkpoint import FILES, OTHERS, write_checkpoint
from tests.fakes.engine import FakeEngine
from tests.fakes.safetensors import Part, parse

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def serving(root: Path, **settings: Any) -> AsyncIterator[Admin]:
    """An admin whose engine was loaded from `root/models/served`."""
    engine = FakeEngine()
    engine.checkpoint = str(write_checkpoint(root / "models" / "served"))
    async with running(root / "state", engine=engine, **settings) as admin:
        yield admin


async def export(admin: Admin, path: Path, version: int | str = 0) -> httpx.Response:
    return await admin.http.post(f"/v1/versions/{version}/export", json={"path": str(path)})


async def ended(admin: Admin, begun: httpx.Response) -> dict[str, Any]:
    """The operation once it no longer runs."""
    assert begun.status_code == 202, begun.text
    for _ in range(1000):
        operation: dict[str, Any] = (await admin.http.get(begun.headers["location"])).json()
        if operation["state"] != "running":
            return operation
        await asyncio.sleep(0.005)
    raise AssertionError("it does not end")


def contents(folder: Path) -> dict[str, Part]:
    return {name: part for file in FILES for name, part in parse((folder / file).read_bytes()).items()}


def headers(folder: Path) -> list[Header]:
    return [shard.header for shard in CheckpointFolder.open(folder, HeaderLimits()).shards]


def nothing_left(root: Path) -> bool:
    """Whether the served folder is all there is."""
    return [path.name for path in (root / "models").iterdir()] == ["served"]


async def test_a_changed_version_as_a_folder_like_the_base(tmp_path: Path) -> None:
    """Same files, same names in them, the engine's weights; configuration and index copied."""
    async with serving(tmp_path) as admin:
        await admin.commit()
        served, target = tmp_path / "models" / "served", tmp_path / "models" / "out"
        (served / "old.bin").write_bytes(b"other weights")
        (served / FILES[0]).chmod(0o640)
        begun = await export(admin, target, 1)
        assert (begun.json()["kind"], begun.json()["state"]) == ("export", "running")
        assert begun.headers["location"] == f"/v1/operations/{begun.json()['id']}"
        operation = await ended(admin, begun)
        assert (operation["state"], operation["problem"]) == ("done", None)
        assert operation["ended_at"] is not None
        size = sum((served / file).stat().st_size for file in FILES)
        assert operation["export"] == {
            **{"version": "1", "path": str(target), "files": 2, "of_files": 2},
            **{"nbytes": size, "of_nbytes": size},
        }
        index = "model.safetensors.index.json"
        assert sorted(path.name for path in target.iterdir()) == sorted([*FILES, *OTHERS, index])
        for name in (*OTHERS, index):
            assert (target / name).read_bytes() == (served / name).read_bytes()
        weights = admin.engine.ranks[0].weights
        found = contents(target)
        assert {name: data for name, (_, _, data) in found.items()} == {
            name: bits.tobytes() for name, bits in weights.items()
        }
        assert found != contents(served)
        assert headers(target) == headers(served)
        assert (target / FILES[0]).stat().st_mode & 0o777 == 0o640
        assert sorted(path.name for path in target.parent.iterdir()) == ["out", "served"]


async def test_what_is_exported_can_be_reloaded(tmp_path: Path) -> None:
    """It is a checkpoint of the same model."""
    async with serving(tmp_path) as admin:
        await admin.commit()
        target = tmp_path / "models" / "out"
        await ended(admin, await export(admin, target, 1))
        changed = {name: bits.copy() for name, bits in admin.engine.ranks[0].weights.items()}
        await admin.http.post("/v1/reload")
        assert (await admin.http.post("/v1/reload", json={"path": str(target)})).status_code == 200
        now = admin.engine.ranks[0].weights
        assert all((now[name] == bits).all() for name, bits in changed.items())


async def test_only_what_the_engine_runs(tmp_path: Path) -> None:
    """The current version, or one with the same weights; others have to be rolled back to."""
    async with serving(tmp_path) as admin:
        await admin.commit()
        answer = await export(admin, tmp_path / "models" / "out", 0)
        assert (answer.status_code, code(answer)) == (409, "version_not_held")
        missing = await export(admin, tmp_path / "models" / "out", 7)
        assert (missing.status_code, code(missing)) == (404, "unknown_version")
        await admin.http.post("/v1/rollback", json={"to_version": 0})
        assert (await ended(admin, await export(admin, tmp_path / "models" / "a", 0)))["state"] == "done"
        assert (await ended(admin, await export(admin, tmp_path / "models" / "b", 2)))["state"] == "done"
        assert code(await export(admin, tmp_path / "models" / "c", 1)) == "version_not_held"


async def test_commits_elsewhere_are_not_in_the_way(tmp_path: Path) -> None:
    """What is written already may change, and what is in other files; the folder is all of its version."""
    async with serving(tmp_path) as admin:
        expected = contents(tmp_path / "models" / "served")
        second = headers(tmp_path / "models" / "served")[1]
        assert Q_PROJ not in second.entries
        first = admin.engine.faults.hold_read = asyncio.Event()
        begun = await export(admin, tmp_path / "models" / "out")
        await until(lambda: "read" in admin.engine.calls)
        hold = admin.engine.faults.hold_read = asyncio.Event()
        first.set()
        await until(lambda: admin.engine.calls.count("read") == 2)
        changed = await admin.http.post("/v1/patches", content=q_proj_body(), headers=OCTETS)
        assert changed.json()["version"] == "1"
        hold.set()
        assert (await ended(admin, begun))["state"] == "done"
        assert contents(tmp_path / "models" / "out") == expected


async def test_never_a_mix_of_two_versions(tmp_path: Path) -> None:
    """A commit to what is not written yet ends the export; one that brings the weights back does not."""
    async with serving(tmp_path) as admin:
        hold = admin.engine.faults.hold_read = asyncio.Event()
        begun = await export(admin, tmp_path / "models" / "out")
        await until(lambda: "read" in admin.engine.calls)
        await admin.commit()
        hold.set()
        operation = await ended(admin, begun)
        assert (operation["state"], operation["problem"]["code"]) == ("failed", "version_moved")
        assert (operation["problem"]["version"], operation["problem"]["file"]) == ("1", FILES[0])
        assert nothing_left(tmp_path)
        hold = admin.engine.faults.hold_read = asyncio.Event()
        begun = await export(admin, tmp_path / "models" / "out", 1)
        await until(lambda: admin.engine.calls[-1] == "read")
        await admin.http.post("/v1/rollback", json={"to_version": 1})
        hold.set()
        assert (await ended(admin, begun))["state"] == "done"


async def test_cancel_leaves_nothing(tmp_path: Path) -> None:
    """When DELETE answers, the folder is gone; a late write of the engine does not bring it back."""
    async with serving(tmp_path) as admin:
        hold = admin.engine.faults.hold_read = asyncio.Event()
        begun = await export(admin, tmp_path / "models" / "out")
        await until(lambda: "read" in admin.engine.calls)
        assert not nothing_left(tmp_path)
        where = begun.headers["location"]
        busy = await export(admin, tmp_path / "models" / "other")
        assert (busy.status_code, code(busy)) == (409, "busy")
        operation = (await admin.http.delete(where)).json()
        assert (operation["state"], operation["export"]["files"]) == ("cancelled", 0)
        assert nothing_left(tmp_path)
        hold.set()
        await asyncio.sleep(0.05)
        assert nothing_left(tmp_path)
        assert (await admin.http.delete(where)).json() == operation
        done = await export(admin, tmp_path / "models" / "out")
        await ended(admin, done)
        assert (await admin.http.delete(done.headers["location"])).json()["state"] == "done"
        assert (tmp_path / "models" / "out").is_dir()
        assert code(await admin.http.delete("/v1/operations/x")) == "unknown_operation"
        assert code(await admin.http.get("/v1/operations/x")) == "unknown_operation"


async def test_the_end_of_the_service_leaves_nothing(tmp_path: Path) -> None:
    """An export does not hold up the end, and what it had written goes."""
    async with serving(tmp_path) as admin:
        admin.engine.faults.hold_read = asyncio.Event()
        await export(admin, tmp_path / "models" / "out")
        await until(lambda: "read" in admin.engine.calls)
    assert nothing_left(tmp_path)


async def test_a_disk_that_is_full_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """507 at once, with the figures, before anything is asked of the engine."""
    async with serving(tmp_path) as admin:
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
        answer = await export(admin, tmp_path / "models" / "out")
        assert (answer.status_code, code(answer), answer.json()["free"]) == (507, "disk_full", 100)
        assert nothing_left(tmp_path) and "read" not in admin.engine.calls


@pytest.mark.parametrize("step", ["copyfile", "fsync"])
async def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """At any write of the service's own: the operation fails with 507, and nothing is left."""

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    async with serving(tmp_path) as admin:
        monkeypatch.setattr(shutil if step == "copyfile" else os, step, full)
        operation = await ended(admin, await export(admin, tmp_path / "models" / "out"))
        assert (operation["problem"]["code"], operation["problem"]["status"]) == ("disk_full", 507)
        assert nothing_left(tmp_path)


async def test_a_cancellation_that_comes_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the folder gets its name it can't be stopped: then it is done, and all of it is there."""
    async with serving(tmp_path) as admin:
        reached, go_on = threading.Event(), threading.Event()
        copy = shutil.copyfile

        def slow(*given: Any) -> None:
            reached.set()
            assert go_on.wait(5)
            copy(*given)

        monkeypatch.setattr(shutil, "copyfile", slow)
        begun = await export(admin, tmp_path / "models" / "out")
        await until(reached.is_set)
        cancelling = asyncio.create_task(admin.http.delete(begun.headers["location"]))
        await asyncio.sleep(0.02)
        go_on.set()
        assert (await cancelling).json()["state"] == "done"
        assert contents(tmp_path / "models" / "out") == contents(tmp_path / "models" / "served")


@pytest.mark.parametrize("reason", [Code.DISK_FULL, Code.TENSOR_UNSUPPORTED, Code.BUSY])
async def test_what_the_engine_refuses(tmp_path: Path, reason: Code) -> None:
    """The operation fails with the engine's code, and nothing is left."""
    async with serving(tmp_path) as admin:
        admin.engine.faults.read = reason
        operation = await ended(admin, await export(admin, tmp_path / "models" / "out"))
        assert (operation["state"], operation["problem"]["code"]) == ("failed", reason)
        assert nothing_left(tmp_path)


async def test_an_engine_that_goes_away(tmp_path: Path) -> None:
    """A lost answer fails it; the next export works."""
    async with serving(tmp_path) as admin:
        admin.line.cuts["read"] = "after"
        operation = await ended(admin, await export(admin, tmp_path / "models" / "out"))
        assert operation["problem"]["code"] == "engine_unavailable" and nothing_left(tmp_path)
        admin.line.cuts.clear()
        again = await ended(admin, await export(admin, tmp_path / "models" / "out"))
        assert again["state"] == "done"


async def test_only_to_new_folders_below_the_roots(tmp_path: Path) -> None:
    """Outside is 403, something that is there 409, a folder in nothing 422; nothing is overwritten."""
    async with serving(tmp_path) as admin:
        models = tmp_path / "models"
        (models / "file").write_text("mine")
        (models / "dangling").symlink_to(models / "nowhere" / "at all")
        for path, status, expected in (
            (tmp_path / "out", 403, "path_not_allowed"),
            (models / ".." / "out", 403, "path_not_allowed"),
            (models / "file", 409, "path_taken"),
            (models, 409, "path_taken"),
            (models / "served", 409, "path_taken"),
            (models / "new" / "out", 422, "bad_value"),
            (models / "dangling", 422, "bad_value"),
            (models / ("x" * 250), 422, "bad_value"),
            (models / "file" / "out", 422, "bad_value"),
        ):
            answer = await export(admin, path)
            assert (answer.status_code, code(answer)) == (status, expected), path
        assert code(await admin.http.post("/v1/versions/0/export", json={})) == "bad_value"
        assert (models / "file").read_text() == "mine" and "read" not in admin.engine.calls


async def test_roots_for_exports_are_their_own(tmp_path: Path) -> None:
    """What may be read is not what may be written."""
    (tmp_path / "exports").mkdir()
    async with serving(tmp_path, export_roots=(tmp_path / "exports",)) as admin:
        assert code(await export(admin, tmp_path / "models" / "out")) == "path_not_allowed"
        assert (await ended(admin, await export(admin, tmp_path / "exports" / "out")))["state"] == "done"


async def test_something_that_comes_to_be_at_the_path_meanwhile(tmp_path: Path) -> None:
    """It is not replaced."""
    async with serving(tmp_path) as admin:
        hold = admin.engine.faults.hold_read = asyncio.Event()
        target = tmp_path / "models" / "out"
        begun = await export(admin, target)
        target.mkdir()
        hold.set()
        assert (await ended(admin, begun))["problem"]["code"] == "path_taken"
        assert list(target.iterdir()) == []


async def test_what_a_dead_process_left_is_removed(tmp_path: Path) -> None:
    """The same export again cleans up; what a living process holds is left alone."""
    async with serving(tmp_path) as admin:
        models = tmp_path / "models"
        dead, alive = models / ".out.1.partial", models / ".out.2.partial"
        for folder in (dead, alive):
            folder.mkdir()
            (folder / FILES[0]).write_bytes(b"half")
        lock = os.open(alive, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            assert (await ended(admin, await export(admin, models / "out")))["state"] == "done"
            assert not dead.exists() and alive.exists()
        finally:
            os.close(lock)


async def test_a_base_that_is_no_longer_the_model(tmp_path: Path) -> None:
    """The base says which tensor goes into which file; if it has changed there is no telling."""
    async with serving(tmp_path) as admin:
        found = contents(tmp_path / "models" / "served")
        del found["model.norm.weight"]
        write_checkpoint(tmp_path / "models" / "served", found)
        assert code(await export(admin, tmp_path / "models" / "out")) == "checkpoint_mismatch"
        (tmp_path / "models" / "served" / FILES[0]).unlink()
        assert code(await export(admin, tmp_path / "models" / "out")) == "bad_checkpoint"
    async with running(tmp_path / "more") as admin:
        assert code(await export(admin, tmp_path / "models" / "out")) == "not_supported"
