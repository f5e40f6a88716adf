"""Rollback, undo budget and baselines: what can be gone back to, and what is kept for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.ledger import Ledger
from tests.fakes.admin import Admin, code, running, until
from tests.fakes.engine import FakeEngine

pytestmark = pytest.mark.anyio

UNDO = 328
"""Bytes of undo of one expert."""


def bits(engine: FakeEngine) -> list[bytes]:
    """All weights of all ranks."""
    return [rank.weights[name].tobytes() for rank in engine.ranks for name in sorted(rank.weights)]


async def roll(admin: Admin, version: int) -> int:
    """Roll back; the HTTP status."""
    return (await admin.http.post("/v1/rollback", json={"to_version": version})).status_code


async def held(admin: Admin) -> list[str]:
    """Versions that can be gone back to."""
    versions = (await admin.http.get("/v1/versions")).json()["versions"]
    return [one["version"] for one in versions if one["held"]]


async def test_rollback_restores_any_version_in_any_order(tmp_path: Path) -> None:
    """Every rollback is a new version with the old bits; failures take none."""
    async with running(tmp_path, ranks=2) as admin:
        states = [bits(admin.engine)]
        for seed in range(1, 4):
            await admin.commit(seed=seed)
            states.append(bits(admin.engine))
        for target in (1, 3, 0, 2, 2, 5, 7):
            answer = await admin.http.post("/v1/rollback", json={"to_version": str(target)})
            receipt = answer.json()
            assert answer.headers["etag"] == f'"{receipt["version"]}"'
            assert (receipt["restores"], int(receipt["version"])) == (str(target), len(states))
            assert bits(admin.engine) == states[target]
            states.append(states[target])
        entry = (await admin.http.get("/v1/versions/4")).json()
        assert (entry["kind"], entry["restores"], entry["base_version"]) == ("rollback", "1", "3")


async def test_rollback_to_the_current_version_takes_a_version(tmp_path: Path) -> None:
    """Going nowhere changes no bit and is a version all the same."""
    async with running(tmp_path) as admin:
        before = bits(admin.engine)
        answer = await admin.http.post("/v1/rollback", json={"to_version": 0})
        assert (answer.status_code, answer.json()["version"]) == (200, "1")
        assert bits(admin.engine) == before


@pytest.mark.parametrize("target", [{"to_version": 4}, {"to_baseline": "none"}])
async def test_rollback_to_what_is_not_there_is_409(tmp_path: Path, target: dict[str, object]) -> None:
    """Versions and names in a body are states, not paths."""
    async with running(tmp_path) as admin:
        answer = await admin.http.post("/v1/rollback", json=target)
        assert (answer.status_code, code(answer)) == (409, "version_not_held")
        assert await admin.version() == "0"


@pytest.mark.parametrize("target", [{}, {"to_version": 0, "to_baseline": "b"}, {"to_version": "x"}, [], None])
async def test_rollback_needs_exactly_one_target(tmp_path: Path, target: object) -> None:
    """None, both or nonsense is 422."""
    async with running(tmp_path) as admin:
        assert code(await admin.http.post("/v1/rollback", json=target)) == "bad_value"


@pytest.mark.parametrize("when", ["before", "middle", "after"])
async def test_a_rollback_that_fails_is_undone(tmp_path: Path, when: str) -> None:
    """A rank that fails in a rollback leaves the version that was there, and a later rollback works."""
    async with running(tmp_path, ranks=2) as admin:
        first = bits(admin.engine)
        await admin.commit()
        second = bits(admin.engine)
        admin.engine.faults.commit[1] = when
        answer = await admin.http.post("/v1/rollback", json={"to_version": 0})
        assert code(answer) == "commit_undone"
        assert bits(admin.engine) == second
        assert await admin.version() == "1"
        assert not any(rank.prepared for rank in admin.engine.ranks)
        admin.engine.faults.commit.clear()
        assert await roll(admin, 0) == 200
        assert bits(admin.engine) == first


async def test_a_failed_rollback_costs_no_way_back(tmp_path: Path) -> None:
    """With the budget used up, what a rollback needs stays until it is done, so it can be tried again."""
    async with running(tmp_path, undo_bytes=2 * UNDO) as admin:
        base = bits(admin.engine)
        for seed in (1, 2):
            await admin.commit(seed=seed)
        admin.engine.faults.commit[0] = "after"
        assert await roll(admin, 0) == 503
        assert sorted(admin.engine.ranks[0].undo) == [1, 2]
        admin.engine.faults.commit.clear()
        assert await roll(admin, 0) == 200
        assert bits(admin.engine) == base


async def test_the_oldest_undo_goes_first(tmp_path: Path) -> None:
    """Over the budget, old versions are no longer held, on the engine and in the history."""
    async with running(tmp_path, undo_bytes=2 * UNDO) as admin:
        for seed in range(1, 5):
            assert (await admin.commit(seed=seed)).status_code == 200
        assert sorted(admin.engine.ranks[0].undo) == [3, 4]
        assert await held(admin) == ["2", "3", "4"]
        assert code(await admin.http.post("/v1/rollback", json={"to_version": 1})) == "version_not_held"
        assert await roll(admin, 2) == 200
        storage = (await admin.http.get("/v1/status")).json()["storage"]["undo"]
        assert storage["used"] <= storage["budget"] == 2 * UNDO


async def test_a_commit_whose_undo_is_over_the_budget_is_refused(tmp_path: Path) -> None:
    """507, nothing forgotten, nothing changed, and the transaction can still be aborted."""
    async with running(tmp_path, undo_bytes=UNDO - 1) as admin:
        before = bits(admin.engine)
        answer = await admin.commit()
        assert (answer.status_code, code(answer)) == (507, "undo_budget")
        assert bits(admin.engine) == before
        assert "commit" not in admin.engine.calls
        (transaction,) = (await admin.http.get("/v1/transactions")).json()["transactions"]
        assert (await admin.http.delete(f"/v1/transactions/{transaction['id']}")).status_code == 200


async def test_a_baseline_keeps_its_undo(tmp_path: Path) -> None:
    """What a baseline needs is not forgotten: commits are refused instead, until the name goes."""
    async with running(tmp_path, undo_bytes=2 * UNDO) as admin:
        base = bits(admin.engine)
        assert (await admin.http.put("/v1/baselines/start", json={"version": 0})).json()["version"] == "0"
        assert (await admin.commit(seed=1)).status_code == 200
        assert (await admin.commit(seed=2)).status_code == 200
        refused = await admin.commit(seed=3)
        assert (refused.status_code, code(refused)) == (507, "undo_budget")
        assert sorted(admin.engine.ranks[0].undo) == [1, 2]
        answer = await admin.http.post("/v1/rollback", json={"to_baseline": "start"})
        assert (answer.status_code, answer.json()["restores"]) == (200, "0")
        assert bits(admin.engine) == base
        # The current version has the baseline's weights now, so the old undo was let go.
        assert await admin.version() == "3"
        assert (await admin.commit(seed=4)).status_code == 200
        assert await roll(admin, 0) == 200
        assert bits(admin.engine) == base
        assert (await admin.http.delete("/v1/baselines/start")).status_code == 204
        for seed in range(5, 9):
            assert (await admin.commit(seed=seed)).status_code == 200
        assert "0" not in await held(admin)


async def test_baselines_can_be_named_moved_listed_and_deleted(tmp_path: Path) -> None:
    """PUT names the current version or another, again moves the name; DELETE ends it."""
    async with running(tmp_path) as admin:
        await admin.commit()
        assert (await admin.http.put("/v1/baselines/b.1")).json()["version"] == "1"
        assert (await admin.http.put("/v1/baselines/b.1", json={"version": "0"})).json()["version"] == "0"
        assert (await admin.http.get("/v1/baselines/b.1")).json()["version"] == "0"
        assert [one["name"] for one in (await admin.http.get("/v1/baselines")).json()["baselines"]] == ["b.1"]
        assert (await admin.http.get("/v1/versions/0")).json()["baselines"] == ["b.1"]
        assert (await admin.http.delete("/v1/baselines/b.1")).status_code == 204
        for answer in (
            await admin.http.get("/v1/baselines/b.1"),
            await admin.http.delete("/v1/baselines/b.1"),
        ):
            assert (answer.status_code, code(answer)) == (404, "unknown_baseline")


@pytest.mark.parametrize("name", ["-x", "%20", "a" * 129, "a%0a", "%80"])
async def test_baseline_names_are_plain(tmp_path: Path, name: str) -> None:
    """Names are short and printable."""
    async with running(tmp_path) as admin:
        assert code(await admin.http.put(f"/v1/baselines/{name}")) == "bad_value"


async def test_a_baseline_of_what_is_not_held_is_409(tmp_path: Path) -> None:
    """Neither a version that has been forgotten nor one that never was can be named."""
    async with running(tmp_path, undo_bytes=UNDO) as admin:
        await admin.commit(seed=1)
        await admin.commit(seed=2)
        for version in (0, 9):
            answer = await admin.http.put("/v1/baselines/b", json={"version": version})
            assert (answer.status_code, code(answer)) == (409, "version_not_held")
        assert (await admin.http.get("/v1/baselines")).json()["baselines"] == []


async def test_an_admin_adopts_the_version_that_the_engine_runs(tmp_path: Path) -> None:
    """An admin that knows nothing of an engine goes on counting and can roll back what that holds."""
    engine = FakeEngine(ranks=2)
    base = bits(engine)
    async with running(tmp_path / "one", engine=engine) as admin:
        await admin.commit(seed=1)
        await admin.commit(seed=2)
        ledger = (await admin.http.get("/v1/versions/current")).json()["ledger"]
    async with running(tmp_path / "other", engine=engine) as admin:
        current = (await admin.http.get("/v1/versions/current")).json()
        assert (current["version"], current["kind"]) == ("2", "adopted")
        assert current["ledger"] != ledger
        assert await held(admin) == ["0", "1", "2"]
        assert await roll(admin, 0) == 200
        assert bits(engine) == base
        assert await admin.version() == "3"


@pytest.mark.parametrize("built_on", [False, True])
async def test_an_adopted_version_goes_with_its_engine(tmp_path: Path, built_on: bool) -> None:
    """What it consists of is not known, so a new engine is not called ready; the refusal says what helps."""
    engine = FakeEngine(ranks=2, base=tmp_path / "models" / "base")
    async with running(tmp_path / "one", engine=engine) as admin:
        await admin.commit(seed=1)
    async with running(tmp_path / "other", engine=engine) as admin:
        if built_on:
            await admin.commit(seed=2)
        engine.restart()
        await until(lambda: admin.service.link.refusal and admin.settled)
        answer = await admin.http.get("/health/ready")
        assert (answer.status_code, code(answer)) == (503, "version_lost")
        assert "another state folder" in answer.json()["detail"]
        assert code(await admin.http.post("/v1/transactions")) == "version_lost"
    async with running(tmp_path / "new", engine=engine) as admin:
        assert await admin.version() == "0"
        assert (await admin.commit(seed=3)).status_code == 200


async def test_an_adopted_version_that_was_made_to_last(tmp_path: Path) -> None:
    """Exported and reloaded from there: it is brought back like any other."""
    engine = FakeEngine(ranks=2, base=tmp_path / "models" / "base")
    async with running(tmp_path / "one", engine=engine) as admin:
        await admin.commit(seed=1)
    async with running(tmp_path / "other", engine=engine) as admin:
        path = {"path": str(tmp_path / "models" / "kept")}
        exported = await admin.http.post("/v1/versions/1/export", json=path)
        await until(lambda: (tmp_path / "models" / "kept").exists())
        assert (await admin.http.get(exported.headers["location"])).status_code == 200
        assert (await admin.http.post("/v1/reload", json=path)).json()["version"] == "2"
        expected = bits(engine)
        engine.restart()
        await until(lambda: engine.ranks[0].version == 2 and not admin.service.link.problem)
        assert bits(engine) == expected != bits(FakeEngine(ranks=2))


async def test_the_list_of_versions_looks_up_once_what_all_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How far undo reaches and which baselines there are is not asked for every version; all is as before."""
    async with running(tmp_path) as admin:
        for seed in range(1, 6):
            await admin.commit(seed=seed)
        for name in ("b", "a"):
            await admin.http.put(f"/v1/baselines/{name}", json={"version": 3})
        one = (await admin.http.get("/v1/versions/3")).json()
        asked: list[str] = []
        for name in ("lowest_reachable", "baselines"):
            monkeypatch.setattr(Ledger, name, counting(asked, name))
        listed = (await admin.http.get("/v1/versions")).json()["versions"]
        assert sorted(asked) == ["baselines", "lowest_reachable"]
        assert listed[3].items() <= one.items()
        assert listed[3]["baselines"] == ["a", "b"]
        asked.clear()
        assert "graft_versions_held 6.0" in (await admin.http.get("/metrics")).text
        assert asked == ["lowest_reachable"]


def counting(asked: list[str], name: str) -> Callable[[Ledger], Any]:
    """The ledger's method, which notes that it was called."""
    method = getattr(Ledger, name)

    def counted(ledger: Ledger) -> Any:
        asked.append(name)
        return method(ledger)

    return counted
