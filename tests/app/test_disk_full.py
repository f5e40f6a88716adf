"""A full disk at every write of ledger and blobs: refused or failed, nothing lost, and then it goes on."""

from pathlib import Path

import pytest

from tests.app.test_recovery import blobs, ready
from tests.app.test_rollback import bits
from tests.fakes.admin import OCTETS, code, expert_body, q_proj_body, running, until
from tests.fakes.engine import FakeEngine

pytestmark = pytest.mark.anyio

KEY = {"idempotency-key": "k"}


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a failpoint can be armed with a full disk."""
    folder = tmp_path / "failpoints"
    folder.mkdir()
    monkeypatch.setenv("GRAFT_FAILPOINTS", str(folder))
    return folder


def arm(folder: Path, point: str) -> None:
    """The disk is full when that point is reached."""
    (folder / point).write_text("full")


@pytest.mark.parametrize("when", ["before", "within"])
async def test_opening_a_transaction(tmp_path: Path, full: Path, when: str) -> None:
    """507, and there is no such transaction."""
    async with running(tmp_path / "state") as admin:
        arm(full, f"view.{when}")
        answer = await admin.http.post("/v1/transactions")
        assert (answer.status_code, code(answer)) == (507, "disk_full")
        assert (await admin.http.get("/v1/transactions")).json()["transactions"] == []
        assert (await admin.commit()).status_code == 200


@pytest.mark.parametrize(
    "point", ["blob.before", "blob.linked", "blob.after", "intent.before", "intent.within"]
)
async def test_before_the_engine_is_touched(tmp_path: Path, full: Path, point: str) -> None:
    """507; the engine was not asked, no blob stays, and the same transaction can be committed later."""
    async with running(tmp_path / "state") as admin:
        transaction = await admin.open()
        await admin.upload(transaction)
        arm(full, point)
        answer = await admin.http.post(f"{transaction}/commit", headers=KEY)
        assert (answer.status_code, code(answer)) == (507, "disk_full")
        assert "commit" not in admin.engine.calls
        assert (await admin.http.get(transaction)).json()["state"] == "prepared"
        assert (blobs(admin), await admin.version()) == ([], "0")
        assert (await admin.http.post(f"{transaction}/commit", headers=KEY)).json()["version"] == "1"


@pytest.mark.parametrize("when", ["before", "within"])
@pytest.mark.parametrize("one_shot", [False, True])
async def test_after_the_engine_was_changed(tmp_path: Path, full: Path, when: str, one_shot: bool) -> None:
    """507, since it is not durable yet; nothing is built on it until it is, and then it counts."""
    async with running(tmp_path / "state", ranks=2) as admin:
        path = "/v1/experts/0/0"
        if not one_shot:
            path = await admin.open()
            await admin.upload(path)
        arm(full, f"outcome.{when}")
        content = expert_body() if one_shot else b""

        async def ask() -> object:
            if one_shot:
                return await admin.http.put(path, content=content, headers=OCTETS | KEY)
            return await admin.http.post(f"{path}/commit", headers=KEY)

        answer = await ask()
        assert (answer.status_code, code(answer)) == (507, "disk_full")  # type: ignore[attr-defined]
        await until(lambda: admin.service.ledger.current.version == 1 and not admin.service.link.problem)
        assert await ready(admin) == "1"
        assert admin.files == []
        (transaction,) = (await admin.http.get("/v1/transactions")).json()["transactions"]
        assert transaction["state"] == "committed"
        again = await ask()
        assert (again.status_code, again.json()["version"]) == (200, "1")  # type: ignore[attr-defined]
        assert (await admin.commit(seed=2)).json()["version"] == "2"


@pytest.mark.parametrize("when", ["before", "within"])
async def test_after_a_commit_was_undone(tmp_path: Path, full: Path, when: str) -> None:
    """The answer is that it was undone; that is written down as soon as it can be."""
    async with running(tmp_path / "state", ranks=2) as admin:
        admin.engine.faults.commit[1] = "middle"
        arm(full, f"abandon.{when}")
        assert code(await admin.commit()) == "commit_undone"
        admin.engine.faults.commit.clear()
        await until(lambda: admin.settled and not admin.service.journal.intent)
        (transaction,) = (await admin.http.get("/v1/transactions")).json()["transactions"]
        assert transaction["state"] == "failed"
        assert (admin.files, blobs(admin)) == ([], [])
        assert (await admin.commit(seed=2)).json()["version"] == "1"


@pytest.mark.parametrize("point", ["reply.within", "digests.within", "view.within"])
async def test_what_can_be_done_without(tmp_path: Path, full: Path, point: str) -> None:
    """Answers of keys, digests and ends of transactions: a commit is a commit without them."""
    async with running(tmp_path / "state") as admin:
        transaction = await admin.open()
        await admin.upload(transaction)
        arm(full, point)
        answer = await admin.http.post(f"{transaction}/commit", headers=KEY)
        assert (answer.status_code, answer.json()["version"]) == (200, "1")
        assert (await admin.http.post(f"{transaction}/commit", headers=KEY)).content == answer.content


async def test_naming_a_baseline(tmp_path: Path, full: Path) -> None:
    """507, and the name stands for what it stood for before."""
    async with running(tmp_path / "state") as admin:
        await admin.commit()
        await admin.http.put("/v1/baselines/b", json={"version": 0})
        for method, body in (("PUT", {"version": 1}), ("DELETE", None)):
            arm(full, "baseline.within")
            answer = await admin.http.request(method, "/v1/baselines/b", json=body)
            assert (answer.status_code, code(answer)) == (507, "disk_full")
            assert (await admin.http.get("/v1/baselines/b")).json()["version"] == "0"


async def test_a_rollback_that_cannot_be_written_down(tmp_path: Path, full: Path) -> None:
    """Before the engine is asked: 507 and nothing happened. After: it counts once it is written."""
    async with running(tmp_path / "state") as admin:
        await admin.commit()
        arm(full, "intent.within")
        assert (await admin.http.post("/v1/rollback", json={"to_version": 0})).status_code == 507
        assert not admin.engine.ranks[0].prepared
        assert await admin.version() == "1"
        arm(full, "outcome.within")
        assert (await admin.http.post("/v1/rollback", json={"to_version": 0})).status_code == 507
        await until(lambda: admin.service.ledger.current.version == 2 and not admin.service.link.problem)
        assert bits(admin.engine) == bits(FakeEngine())


async def test_a_database_that_cannot_grow(tmp_path: Path) -> None:
    """SQLite's own word for a full disk is the same refusal, and leaves the ledger usable."""
    async with running(tmp_path) as admin:
        database = admin.service.journal._database

        async def limit(pages: int) -> None:
            await database.read(lambda c: c.execute(f"PRAGMA max_page_count = {pages}").fetchone())

        await admin.commit()
        await limit(1)
        refused = [await admin.http.post("/v1/patches", content=q_proj_body(), headers=OCTETS)]
        for _ in range(100):
            refused.append(await admin.http.post("/v1/transactions", json={"label": "x" * 200}))
        assert {code(one) for one in refused if one.status_code >= 400} == {"disk_full"}
        before = int(await admin.version())
        await limit(1_000_000)
        assert (await admin.commit(seed=2)).json()["version"] == str(before + 1)


async def test_a_start_on_a_full_disk(tmp_path: Path, full: Path) -> None:
    """What was open is interrupted all the same, and the service comes up."""
    engine = FakeEngine()
    async with running(tmp_path / "state", engine=engine) as admin:
        await admin.commit()
        transaction = await admin.open()
    arm(full, "view.within")
    async with running(tmp_path / "state", engine=engine) as admin:
        assert code(await admin.http.post(f"{transaction}/commit")) == "interrupted"
        assert await ready(admin) == "1"
