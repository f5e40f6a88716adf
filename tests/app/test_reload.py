"""Reload: another folder or the same one again, as a version like any other; or nothing at all."""

import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.settings import Settings
from schemas.bridge import RankError
from schemas.problems import Code
from tests.fakes.admin import Q_PROJ, Admin, bf16, code, running
from tests.fakes.checkpoint import FILES, parts, write_checkpoint
from tests.fakes.engine import FakeEngine, base_weights
from tests.fakes.safetensors import Part, body

pytestmark = pytest.mark.anyio

ODD = "model.odd"
"""The tensor that the fake engine can't update."""


@asynccontextmanager
async def serving(root: Path, **settings: Any) -> AsyncIterator[Admin]:
    """An admin whose engine was loaded from `root/models/served`."""
    engine = FakeEngine(ranks=2)
    engine.checkpoint = str(write_checkpoint(root / "models" / "served"))
    async with running(root / "state", engine=engine, **settings) as admin:
        yield admin


def changed(seed: int = 3) -> dict[str, Part]:
    """The base with other values in everything that can be updated."""
    found = parts(base_weights())
    for place, (name, (dtype, shape, data)) in enumerate(found.items()):
        if name != ODD:
            found[name] = (dtype, shape, bf16(seed + place, len(data) // 2))
    return found


def weights(admin: Admin) -> list[dict[str, bytes]]:
    """Raw bits of every rank."""
    return [{name: bits.tobytes() for name, bits in rank.weights.items()} for rank in admin.engine.ranks]


def wanted(found: dict[str, Part]) -> list[dict[str, bytes]]:
    return [{name: data for name, (_, _, data) in found.items()}] * 2


async def reload(admin: Admin, path: Path | None = None, **options: Any) -> httpx.Response:
    given = options if path is None else {"path": str(path)} | options
    return await admin.http.post("/v1/reload", json=given)


async def test_another_folder_is_a_version_like_any_other(tmp_path: Path) -> None:
    """One prepare, one commit; receipt and history name the folder; rollback goes back."""
    async with serving(tmp_path) as admin:
        other = write_checkpoint(tmp_path / "models" / "other", changed())
        before = weights(admin)
        answer = await reload(admin, other, label="new", in_flight="wait", drain_timeout_s=2)
        receipt = answer.json()
        assert (answer.status_code, answer.headers["etag"]) == (200, '"1"')
        assert (receipt["path"], receipt["label"], receipt["base_version"]) == (str(other), "new", "0")
        assert (receipt["tensors"], receipt["in_flight"]) == (13, "finished")
        assert weights(admin) == wanted(changed())
        entry = (await admin.http.get("/v1/versions/1")).json()
        assert (entry["kind"], entry["path"], entry["label"]) == ("reload", str(other), "new")
        assert admin.engine.calls.count("prepare") == admin.engine.calls.count("commit") == 1
        assert (await admin.http.post("/v1/rollback", json={"to_version": 0})).status_code == 200
        assert weights(admin) == before
        assert admin.files == []


async def test_the_same_folder_is_really_read_again(tmp_path: Path) -> None:
    """Without a path: what commits have changed is as on disk again, and what changed on disk is taken."""
    async with serving(tmp_path) as admin:
        base = weights(admin)
        await admin.commit()
        assert (await admin.http.post("/v1/reload")).json()["version"] == "2"
        assert weights(admin) == base
        write_checkpoint(tmp_path / "models" / "served", changed())
        assert (await reload(admin)).json()["path"] == admin.engine.checkpoint
        assert weights(admin) == wanted(changed())


async def test_without_a_path_it_is_the_current_versions_folder(tmp_path: Path) -> None:
    """The latest reload's, also after commits on it; after a rollback to before it the one before it."""
    async with serving(tmp_path) as admin:
        other = write_checkpoint(tmp_path / "models" / "other", changed())
        await reload(admin, other)
        await admin.commit()
        assert (await admin.http.get("/v1/status")).json()["checkpoint"] == str(other)
        assert (await reload(admin)).json()["path"] == str(other)
        await admin.http.post("/v1/rollback", json={"to_version": 0})
        assert (await admin.http.get("/v1/status")).json()["checkpoint"] == admin.engine.checkpoint
        assert (await reload(admin)).json()["path"] == admin.engine.checkpoint
        await admin.http.post("/v1/rollback", json={"to_version": 1})
        assert (await reload(admin)).json()["path"] == str(other)


Damage = Callable[[Path], None]


def no_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


def index_leads_out(folder: Path) -> None:
    weight_map = {"a": f"../served/{FILES[0]}"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def truncated(folder: Path) -> None:
    content = (folder / FILES[1]).read_bytes()
    (folder / FILES[1]).write_bytes(content[:-1])


def trailing(folder: Path) -> None:
    content = (folder / FILES[1]).read_bytes()
    (folder / FILES[1]).write_bytes(content + b"\0")


def twice(folder: Path) -> None:
    shutil.copy(folder / FILES[0], folder / FILES[1])


def lost(folder: Path) -> None:
    (folder / FILES[0]).unlink()


DAMAGES = (no_index, index_leads_out, truncated, trailing, twice, lost, shutil.rmtree)


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_folder_is_refused(tmp_path: Path, damage: Damage) -> None:
    """Nothing is sent to the engine, no version is used."""
    async with serving(tmp_path) as admin:
        folder = write_checkpoint(tmp_path / "models" / "other", changed())
        damage(folder)
        answer = await reload(admin, folder)
        assert (answer.status_code, code(answer)) == (422, "bad_checkpoint")
        assert await admin.version() == "0" and "prepare" not in admin.engine.calls


async def test_another_model_is_refused_by_its_first_differences(tmp_path: Path) -> None:
    """Missing, strange, of another shape and of another dtype: each is named."""
    async with serving(tmp_path) as admin:
        found = changed()
        del found["model.norm.weight"]
        found["model.more"] = found[Q_PROJ]
        dtype, _, data = found[Q_PROJ]
        found[Q_PROJ] = (dtype, (4, 16), data)
        answer = await reload(admin, write_checkpoint(tmp_path / "models" / "other", found))
        assert (answer.status_code, code(answer)) == (422, "checkpoint_mismatch")
        named = {one["name"]: one["detail"] for one in answer.json()["errors"]}
        assert set(named) == {"model.norm.weight", "model.more", Q_PROJ}
        assert "BF16 [4, 16], not BF16 [8, 8]" in named[Q_PROJ]
        assert "prepare" not in admin.engine.calls


async def test_what_cannot_be_updated_must_be_equal(tmp_path: Path) -> None:
    """Otherwise the version would not be what the folder is."""
    async with serving(tmp_path) as admin:
        found = changed()
        dtype, shape, _ = found[ODD]
        found[ODD] = (dtype, shape, bytes(16))
        answer = await reload(admin, write_checkpoint(tmp_path / "models" / "other", found))
        assert code(answer) == "tensor_unsupported"
        assert [one["name"] for one in answer.json()["errors"]] == [ODD]
        assert admin.files == [] and "prepare" not in admin.engine.calls


async def test_only_below_the_roots(tmp_path: Path) -> None:
    """Outside, relative, by `..` or by a link: refused, whether anything is there or not."""
    async with serving(tmp_path) as admin:
        outside = write_checkpoint(tmp_path / "outside", changed())
        link = tmp_path / "models" / "link"
        link.symlink_to(outside)
        dotted = tmp_path / "models" / ".." / "outside"
        for path in (outside, link, dotted, tmp_path / "nothing", Path("/")):
            answer = await reload(admin, path)
            assert (answer.status_code, code(answer)) == (403, "path_not_allowed"), path
        for given in ("models/other", "", "/a\0b", "/" + "x" * 5000):
            assert code(await admin.http.post("/v1/reload", json={"path": given})) == "bad_value"
        linked = write_checkpoint(tmp_path / "models" / "linked", changed())
        (linked / FILES[0]).unlink()
        (linked / FILES[0]).symlink_to(outside / FILES[0])
        assert code(await reload(admin, linked)) == "path_not_allowed"
        assert await admin.version() == "0" and "prepare" not in admin.engine.calls


async def test_roots_can_be_set(tmp_path: Path) -> None:
    """Then they replace the default, but the served folder itself can always be read again."""
    async with serving(tmp_path, reload_roots=(tmp_path / "elsewhere",)) as admin:
        near = write_checkpoint(tmp_path / "models" / "other", changed())
        far = write_checkpoint(tmp_path / "elsewhere" / "other", changed())
        assert code(await reload(admin, near)) == "path_not_allowed"
        assert (await reload(admin, far)).status_code == 200
        await admin.http.post("/v1/rollback", json={"to_version": 0})
        assert (await reload(admin)).status_code == 200


def test_roots_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As JSON lists."""
    monkeypatch.setenv("GRAFT_RELOAD_ROOTS", '["/a", "/b c"]')
    assert (Settings().reload_roots, Settings().export_roots) == ((Path("/a"), Path("/b c")), ())


def fail_prepare(admin: Admin) -> None:
    admin.engine.faults.prepare[1] = RankError(code=Code.INTERNAL, detail="because")


def fail_commit(admin: Admin) -> None:
    admin.engine.faults.commit[1] = "middle"


def refuse(admin: Admin) -> None:
    admin.engine.faults.refuse = Code.DRAIN_TIMEOUT


@pytest.mark.parametrize(
    ("fail", "expected"),
    [(fail_prepare, "prepare_failed"), (fail_commit, "commit_undone"), (refuse, "drain_timeout")],
)
async def test_a_reload_that_fails_leaves_everything(
    tmp_path: Path, fail: Callable[[Admin], None], expected: str
) -> None:
    """Old weights, old version, old path; nothing stays prepared, and the next one works."""
    async with serving(tmp_path) as admin:
        other = write_checkpoint(tmp_path / "models" / "other", changed())
        before = weights(admin)
        fail(admin)
        assert code(await reload(admin, other)) == expected
        assert weights(admin) == before and await admin.version() == "0"
        assert not any(rank.prepared for rank in admin.engine.ranks)
        faults = admin.engine.faults
        faults.prepare, faults.commit, faults.refuse = {}, {}, None
        assert (await admin.http.get("/v1/status")).json()["checkpoint"] == admin.engine.checkpoint
        assert (await reload(admin)).json()["path"] == admin.engine.checkpoint


async def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    """A trainer that writes into the folder meanwhile: no version has half of it."""
    async with serving(tmp_path) as admin:
        other = write_checkpoint(tmp_path / "models" / "other", changed())
        prepare = admin.service.client.prepare

        async def touched(*given: Any, **named: Any) -> Any:
            (other / FILES[0]).write_bytes((other / FILES[0]).read_bytes())
            return await prepare(*given, **named)

        admin.service.client.prepare = touched  # type: ignore[method-assign]  # the moment matters
        assert code(await reload(admin, other)) == "bad_checkpoint"
        assert await admin.version() == "0" and not any(rank.prepared for rank in admin.engine.ranks)


async def test_preconditions_and_budget(tmp_path: Path) -> None:
    """It is refused on a version that moved on, and without room for its undo."""
    async with serving(tmp_path, undo_bytes=1000) as admin:
        assert code(await reload(admin, base_version=3)) == "version_moved"
        answer = await admin.http.post("/v1/reload", headers={"if-match": '"3"'})
        assert code(answer) == "precondition_failed"
        assert code(await reload(admin)) == "undo_budget"
        assert not any(rank.prepared for rank in admin.engine.ranks)
        assert code(await reload(admin, in_flight="later")) == "bad_value"


async def test_an_engine_that_does_not_name_its_folder(tmp_path: Path) -> None:
    """Then there is no default root, and no folder to read again."""
    async with running(tmp_path) as admin:
        assert code(await reload(admin)) == "not_supported"


async def test_a_single_file_is_a_checkpoint_too(tmp_path: Path) -> None:
    """Without an index every safetensors file of the folder counts."""
    async with serving(tmp_path) as admin:
        folder = tmp_path / "models" / "single"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(body(changed()))
        assert (await reload(admin, folder)).status_code == 200
        assert weights(admin) == wanted(changed())
