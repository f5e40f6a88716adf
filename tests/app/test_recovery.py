"""Recovery: whoever is restarted, what was acknowledged is there again, proved before it counts."""

import asyncio
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from app.digests import VersionDigests
from schemas.bridge import RankError
from schemas.problems import Code
from tests.app.test_rollback import bits, held, roll
from tests.fakes.admin import OCTETS, Admin, asleep, code, expert_body, q_proj_body, running, until
from tests.fakes.engine import FakeEngine, Line, base_weights, write_base

pytestmark = pytest.mark.anyio


def blobs(admin: Admin) -> list[str]:
    """Names of the kept uploads."""
    return sorted(path.name for path in (admin.state_dir / "blobs").iterdir())


async def ready(admin: Admin) -> str:
    """The version if ready, else the code."""
    answer = await admin.http.get("/health/ready")
    return str(answer.json()["version"]) if answer.status_code == 200 else code(answer)


async def test_the_history_survives_the_admin(tmp_path: Path) -> None:
    """Ledger id, versions, receipts, baselines and undo are there again; so are ended transactions."""
    engine = FakeEngine(ranks=2)
    async with running(tmp_path, engine=engine) as admin:
        receipt = (await admin.commit(seed=1, label="one")).json()
        await admin.commit(seed=2)
        await admin.http.put("/v1/baselines/b", json={"version": 1})
        await roll(admin, 0)
        versions = (await admin.http.get("/v1/versions")).json()
        transactions = (await admin.http.get("/v1/transactions")).json()
    async with running(tmp_path, engine=engine) as admin:
        assert (await admin.http.get("/v1/versions")).json() == versions
        assert (await admin.http.get("/v1/versions/1")).json()["receipt"] == receipt
        assert (await admin.http.get("/v1/transactions")).json() == transactions
        assert (await admin.http.get("/v1/baselines/b")).json()["version"] == "1"
        assert await roll(admin, 1) == 200
        assert await admin.version() == "4"


async def test_open_transactions_are_interrupted(tmp_path: Path) -> None:
    """What was open when the admin ended shows as interrupted and answers 410; its files are gone."""
    engine = FakeEngine()
    async with running(tmp_path, engine=engine) as admin:
        transaction = await admin.open(label="x")
        await admin.upload(transaction)
    async with running(tmp_path, engine=engine) as admin:
        view = (await admin.http.get(transaction)).json()
        assert (view["state"], view["label"]) == ("interrupted", "x")
        for answer in (
            await admin.upload(transaction),
            await admin.http.post(f"{transaction}/prepare"),
            await admin.http.post(f"{transaction}/commit"),
            await admin.http.delete(transaction),
        ):
            assert (answer.status_code, code(answer)) == (410, "interrupted")
        assert admin.files == []


@pytest.mark.parametrize("admin_too", [False, True])
async def test_a_new_engine_is_replayed_in_one_step(tmp_path: Path, admin_too: bool) -> None:
    """Base to current by one prepare and one commit, without what was overwritten later; then as before."""
    engine = FakeEngine(ranks=2)
    async with running(tmp_path, engine=engine) as admin:
        for seed in (1, 2, 3):
            await admin.commit(seed=seed)
        await admin.http.post("/v1/patches", content=q_proj_body(), headers=OCTETS)
        expected = bits(engine)
        assert len(blobs(admin)) == 4
        if not admin_too:
            engine.calls.clear()
            engine.restart()
            await until(lambda: engine.ranks[0].version == 4 and not admin.service.link.problem)
            assert [engine.calls.count(name) for name in ("prepare", "commit")] == [1, 1]
    if admin_too:
        engine.restart()
    async with running(tmp_path, engine=engine) as admin:
        assert bits(engine) == expected
        assert await ready(admin) == "4"
        assert engine.ranks[0].undo == {}
        assert await held(admin) == ["4"]
        assert (await admin.commit(seed=9)).json()["version"] == "5"
        assert await roll(admin, 4) == 200
        assert bits(engine) == expected


async def test_a_replayed_version_sends_only_what_shows(tmp_path: Path) -> None:
    """Of three uploads of one expert the last is sent."""
    engine = FakeEngine()
    async with running(tmp_path, engine=engine) as admin:
        for seed in (1, 2, 3):
            await admin.commit(seed=seed)
        sent = []
        prepare = engine._pieces
        engine._pieces = lambda rank, request: (sent.append(request), prepare(rank, request))[1]  # type: ignore[method-assign]
        engine.restart()
        await until(lambda: engine.ranks[0].version == 3)
        assert [len(request.uploads) for request in sent] == [1]


async def proved(admin: Admin) -> bool | None:
    """What the status says of how the engine was brought to its version."""
    found: bool | None = (await admin.http.get("/v1/status")).json()["engine"]["proved"]
    return found


async def test_a_replay_that_is_like_before_is_proved(tmp_path: Path) -> None:
    """A first engine has nothing to be compared with; a replayed one has the digests that were recorded."""
    async with running(tmp_path) as admin:
        assert await proved(admin) is None
        await admin.commit(seed=1)
        service = admin.service
        engine = service.link.require()
        for _ in range(500):
            if await service.recovery._digests.known(engine, 1):
                break
            await asyncio.sleep(0.01)
        admin.engine.restart()
        await until(lambda: admin.engine.ranks[0].version == 1 and not service.link.problem)
        assert await proved(admin) is True


async def test_a_replay_without_digests_is_not_called_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If none were recorded it is said, in log and status; the replay does not vouch for the next one."""
    monkeypatch.setattr(VersionDigests, "want", lambda digests: None)
    engine = FakeEngine()
    async with running(tmp_path, engine=engine) as admin:
        await admin.commit(seed=1)
        expected = bits(engine)
        for _ in range(2):
            caplog.clear()
            engine.restart()
            await until(lambda: engine.ranks[0].version == 1 and not admin.service.link.problem)
            assert (await ready(admin), bits(engine) == expected) == ("1", True)
            assert await proved(admin) is False
            assert "version 1 was replayed and could not be compared" in caplog.text
    async with running(tmp_path, engine=engine) as admin:
        assert await proved(admin) is None


async def test_an_empty_lineage_is_replayed(tmp_path: Path) -> None:
    """A version that has the base's weights under another number is one of the history, too."""
    async with running(tmp_path) as admin:
        await admin.commit()
        await roll(admin, 0)
        admin.engine.restart()
        await until(lambda: admin.engine.ranks[0].version == 2 and not admin.service.link.problem)
        assert bits(admin.engine) == bits(FakeEngine())
        assert await ready(admin) == "2"


async def test_ready_says_recovering_with_progress(tmp_path: Path) -> None:
    """While a new engine is replayed nothing can be changed, and the status says how far it is."""
    async with running(tmp_path) as admin:
        await admin.commit()
        hold = admin.engine.faults.hold = asyncio.Event()
        admin.engine.restart()
        await until(lambda: admin.service.recovery.progress and admin.engine.calls[-1] == "commit")
        assert await ready(admin) == "recovering"
        status = (await admin.http.get("/v1/status")).json()
        assert status["engine"]["progress"]["phase"] == "replaying"
        assert (status["writable"], status["version"]) == (False, "1")
        assert code(await admin.http.post("/v1/transactions")) == "recovering"
        hold.set()
        await until(lambda: not admin.service.link.problem)
        assert await ready(admin) == "1"


async def test_a_failing_replay_is_tried_again(tmp_path: Path) -> None:
    """A rank that can't prepare keeps the service recovering until it can."""
    async with running(tmp_path, ranks=2) as admin:
        await admin.commit()
        expected = bits(admin.engine)
        admin.engine.faults.prepare[1] = RankError(code=Code.INTERNAL, detail="no memory")
        admin.engine.restart()
        await until(lambda: "Not yet" in (admin.service.link.problem or ""))
        assert await ready(admin) in ("recovering", "engine_unavailable")
        admin.engine.faults.prepare.clear()
        await until(lambda: not admin.service.link.problem)
        assert bits(admin.engine) == expected


async def test_a_replay_that_fails_in_the_middle_needs_another_engine(tmp_path: Path) -> None:
    """It keeps no undo: the engine's weights are unknown, and nothing is ready, until that is restarted."""
    async with running(tmp_path, ranks=2) as admin:
        await admin.commit()
        expected = bits(admin.engine)
        admin.engine.faults.commit[1] = "middle"
        admin.engine.restart()
        await until(lambda: admin.service.link.unknown)
        assert await ready(admin) == "state_unknown"
        admin.engine.faults.commit.clear()
        admin.engine.restart()
        await until(lambda: not admin.service.link.problem)
        assert bits(admin.engine) == expected


@pytest.mark.parametrize("answer", ["after", "before"])
async def test_a_commit_in_doubt_is_settled_with_a_surviving_engine(tmp_path: Path, answer: str) -> None:
    """The admin dies between asking and writing down: the engine's version says whether it was done."""
    engine = FakeEngine(ranks=2)
    line = Line(engine)
    async with asleep(tmp_path, line, engine_settle_s=0.2) as admin:
        await until(lambda: admin.settled)
        await admin.commit(seed=1)
        transaction = await admin.open()
        await admin.upload(transaction, seed=2)
        line.cuts, line.then = {"commit": answer}, "refused"
        assert (await admin.http.post(f"{transaction}/commit")).status_code == 500
    done = answer == "after"
    async with running(tmp_path, engine=engine, engine_settle_s=0.4) as admin:
        assert await admin.version() == ("2" if done else "1")
        view = (await admin.http.get(transaction)).json()
        assert view["state"] == ("committed" if done else "failed")
        assert (await admin.http.get("/health/ready")).status_code == 200
        assert len(blobs(admin)) == (2 if done else 1)
        assert (await admin.commit(seed=3)).json()["version"] == ("3" if done else "2")
        expected = bits(engine)
        engine.restart()
        await until(lambda: engine.ranks[0].version > 0 and not admin.service.link.problem)
        assert bits(engine) == expected


async def test_a_commit_in_doubt_is_undone_by_a_new_engine(tmp_path: Path) -> None:
    """Admin and engine die: the version that was acknowledged last is brought back."""
    engine = FakeEngine()
    line = Line(engine)
    async with asleep(tmp_path, line, engine_settle_s=0.2) as admin:
        await until(lambda: admin.settled)
        await admin.commit(seed=1)
        expected = bits(engine)
        line.cuts, line.then = {"commit": "after"}, "refused"
        assert (await admin.commit(seed=2)).status_code == 500
    engine.restart()
    async with running(tmp_path, engine=engine) as admin:
        assert (await admin.version(), await ready(admin)) == ("1", "1")
        assert bits(engine) == expected


async def test_weights_that_changed_by_themselves_are_noticed(tmp_path: Path) -> None:
    """A surviving engine has to have the digests of the version that it says it runs."""
    engine = FakeEngine()
    async with running(tmp_path, engine=engine) as admin:
        await admin.commit(seed=1)
        await until(lambda: "digests" in engine.calls[engine.calls.index("commit") :])
        await asyncio.sleep(0.05)
    engine.ranks[0].weights["model.norm.weight"][3] ^= 1
    async with running(tmp_path, engine=engine) as admin:
        assert await ready(admin) == "state_unknown"


@pytest.mark.parametrize("how", ["header", "values"])
async def test_a_base_that_changed_is_not_served_as_ready(tmp_path: Path, how: str) -> None:
    """Other tensors or other values in the checkpoint: base_changed, until the old one is back."""
    folder = tmp_path / "base"
    engine = FakeEngine(base=folder)
    async with running(tmp_path / "state", engine=engine) as admin:
        await admin.commit(seed=1)
        expected = bits(engine)
        shutil.copytree(folder, tmp_path / "old")
        if how == "values":
            weights = base_weights()
            weights["model.norm.weight"][0] ^= 1
            write_base(folder, weights)
        else:
            (folder / "model-1.safetensors").rename(folder / "model-2.safetensors")
        engine.restart()
        await until(lambda: admin.service.link.refusal and admin.settled)
        assert await ready(admin) == "base_changed"
        assert code(await admin.http.post("/v1/transactions")) == "base_changed"
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "old", folder)
        engine.restart()
        await until(lambda: not admin.service.link.problem)
        assert bits(engine) == expected


async def test_a_damaged_blob_is_not_replayed(tmp_path: Path) -> None:
    """Kept bytes are checked before they are used; the file is named, and nothing is written."""
    async with running(tmp_path) as admin:
        await admin.commit(seed=1)
        (name,) = blobs(admin)
        path = tmp_path / "blobs" / name
        good = path.read_bytes()
        path.chmod(0o600)
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        admin.engine.restart()
        await until(lambda: admin.service.link.refusal and admin.settled)
        answer = await admin.http.get("/health/ready")
        assert code(answer) == "ledger_damaged"
        assert name in answer.json()["detail"]
        assert bits(admin.engine) == bits(FakeEngine())
        path.write_bytes(good)
        admin.engine.restart()
        await until(lambda: not admin.service.link.problem)
        assert await ready(admin) == "1"


@pytest.mark.parametrize("damage", ["empty", "zeros", "torn", "other", "later", "gone"])
async def test_a_damaged_ledger_is_not_built_on(tmp_path: Path, damage: str) -> None:
    """The service comes up, says what is wrong and refuses changes; the file stays as it is."""
    engine = FakeEngine()
    async with running(tmp_path, engine=engine) as admin:
        await admin.commit(seed=1)
    path = tmp_path / "ledger.sqlite"
    content = path.read_bytes()
    if damage == "later":
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version = 99")
        connection.close()
    elif damage == "gone":
        path.unlink()
    else:
        wrong = {"empty": b"", "zeros": bytes(len(content)), "torn": content[:5000], "other": b"[]" * 5000}
        path.write_bytes(wrong[damage])
    before = path.read_bytes() if path.exists() else None
    async with running(tmp_path, engine=engine) as admin:
        assert await ready(admin) == "ledger_damaged"
        assert (await admin.http.get("/health/live")).status_code == 200
        assert code(await admin.http.post("/v1/transactions")) == "ledger_damaged"
        assert (await admin.http.get("/v1/status")).json()["writable"] is False
        assert len(blobs(admin)) == 1
    assert (path.read_bytes() if path.exists() else None) == before


async def test_a_ledger_belongs_to_one_process(tmp_path: Path) -> None:
    """A second admin on the same folder does not start."""
    async with running(tmp_path):
        with pytest.raises(Exception, match="state_in_use"):
            async with running(tmp_path):
                pass


async def test_rollback_past_the_undo(tmp_path: Path) -> None:
    """With the base's files at hand every kept version can be had again, also on a new engine."""
    engine = FakeEngine(ranks=2, base=tmp_path / "base")
    async with running(tmp_path / "state", engine=engine, undo_bytes=500) as admin:
        states = [bits(engine)]
        for seed in range(1, 4):
            await admin.commit(seed=seed)
            states.append(bits(engine))
        answer = await admin.http.post("/v1/patches", content=q_proj_body(), headers=OCTETS)
        assert answer.status_code == 200
        states.append(bits(engine))
        assert len(engine.ranks[0].undo) < 4
        assert await held(admin) == ["0", "1", "2", "3", "4"]
        for target in (1, 0, 3):
            assert await roll(admin, target) == 200
            assert bits(engine) == states[target]
            states.append(states[target])
        engine.restart()
        await until(lambda: engine.ranks[0].version == 7 and not admin.service.link.problem)
        for target in (4, 2, 7):
            assert await roll(admin, target) == 200
            assert bits(engine) == states[target]
            states.append(states[target])


async def test_blobs_go_when_no_version_needs_them(tmp_path: Path) -> None:
    """Over the budget the oldest versions are let go; baselines and the current version stay within reach."""
    engine = FakeEngine(base=tmp_path / "base")
    async with running(tmp_path / "state", engine=engine) as admin:
        await admin.commit(seed=1)
        size = (await admin.http.get("/v1/status")).json()["storage"]["kept"]["used"]
    async with running(tmp_path / "state", engine=engine, blob_bytes=3 * size) as admin:
        await admin.http.put("/v1/baselines/first", json={"version": 1})
        for seed in (2, 3, 4):
            assert (await admin.commit(seed=seed)).status_code == 200
        assert await held(admin) == ["0", "1", "3", "4"]
        kept = (await admin.http.get("/v1/status")).json()["storage"]["kept"]
        assert (kept["used"], kept["budget"]) == (3 * size, 3 * size)
        assert code(await admin.http.post("/v1/rollback", json={"to_version": 2})) == "version_not_held"
        await admin.http.delete("/v1/baselines/first")
        assert (await admin.commit(seed=5)).status_code == 200
        assert len(blobs(admin)) == 3
        assert "1" not in await held(admin)


async def test_the_blob_budget_refuses_what_it_could_not_keep(tmp_path: Path) -> None:
    """A commit or baseline that would have to be kept beyond the budget is 507, and nothing happens."""
    budget = len(expert_body()) + 100
    async with running(tmp_path, engine=FakeEngine(base=tmp_path / "b"), blob_bytes=budget) as admin:
        assert (await admin.commit(seed=1)).status_code == 200
        refused = await admin.http.post("/v1/patches", content=q_proj_body(), headers=OCTETS)
        assert (refused.status_code, code(refused)) == (507, "blob_budget")
        assert (await admin.http.put("/v1/baselines/b")).status_code == 200
        refused = await admin.commit(seed=2)
        assert (refused.status_code, code(refused)) == (507, "blob_budget")
        assert (await admin.version(), len(blobs(admin))) == ("1", 1)
        await admin.http.delete("/v1/baselines/b")
        assert (await admin.commit(seed=2)).json()["version"] == "2"


async def test_identical_uploads_share_a_blob(tmp_path: Path) -> None:
    """Blobs are named by content; a version that is let go leaves those that another one needs."""
    async with running(tmp_path) as admin:
        for seed in (1, 2, 1):
            await admin.commit(seed=seed)
        assert len(blobs(admin)) == 2
        admin.engine.restart()
        await until(lambda: admin.engine.ranks[0].version == 3 and not admin.service.link.problem)
        other = FakeEngine()
        async with running(tmp_path / "other", engine=other) as second:
            await second.commit(seed=1)
        assert all(
            np.array_equal(other.ranks[0].weights[n], admin.engine.ranks[0].weights[n])
            for n in other.ranks[0].weights
        )


async def test_files_of_an_undone_commit_are_freed_once(tmp_path: Path) -> None:
    """A commit of unknown outcome has let go of its files; that it is undone frees no room of others."""
    async with running(tmp_path) as admin:
        other = await admin.open()
        await admin.upload(other)
        used = admin.service.staging.budget.used
        admin.engine.faults.commit, admin.engine.faults.undo = {0: "middle"}, {0}
        transaction = await admin.open()
        await admin.upload(transaction)
        answer = await admin.http.post(f"{transaction}/commit")
        assert code(answer) == "state_unknown"
        admin.engine.faults.commit, admin.engine.faults.undo = {}, set()
        admin.engine.restart()
        await until(lambda: admin.service.link.problem is None)
        view = (await admin.http.get(transaction)).json()
        assert (view["state"], view["problem"]["code"]) == ("failed", "commit_undone")
        assert admin.service.staging.budget.used == used > 0
