"""Commits: all ranks or none, whatever happens on the engine or on the way to it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from app import outcome
from app.committer import Committer
from app.receipts import Change
from app.records import Intent
from loaders.staged import StagedFile
from schemas.bridge import RankError
from schemas.problems import Code, ProblemError
from tests.fakes.admin import OCTETS, Admin, code, expert_body, expert_parts, q_proj_body, running, until
from tests.fakes.engine import FakeEngine, base_weights
from tests.fakes.safetensors import parse

pytestmark = pytest.mark.anyio


def is_base(engine: FakeEngine) -> bool:
    """Whether every rank holds exactly the base weights."""
    base = base_weights()
    return all(bool((rank.weights[name] == base[name]).all()) for rank in engine.ranks for name in base)


async def works(admin: Admin, version: str) -> bool:
    """Whether a correct commit goes through and takes `version`."""
    answer = await admin.commit(seed=77)
    return answer.status_code == 200 and answer.json()["version"] == version


async def test_a_commit_takes_one_prepare_and_one_commit(tmp_path: Path) -> None:
    """Two bridge calls change every rank; the receipt tells what they did."""
    async with running(tmp_path, ranks=2) as admin:
        answer = await admin.commit(seed=5, label="hello")
        receipt = answer.json()
        assert (answer.status_code, answer.headers["etag"]) == (200, '"1"')
        assert admin.engine.calls.count("prepare") == admin.engine.calls.count("commit") == 1
        assert [rank.version for rank in admin.engine.ranks] == [1, 1]
        assert (receipt["version"], receipt["base_version"], receipt["label"]) == ("1", "0", "hello")
        assert (receipt["tensors"], receipt["experts"]) == (4, 1)
        assert [rank["boot"] for rank in receipt["ranks"]] == ["boot-1-0", "boot-1-1"]
        assert receipt["nbytes"]["written"] == receipt["nbytes"]["undo"] == 2 * 164 * 2
        assert receipt["timing"]["pause_ms"] == 2.0
        assert receipt["caches"]["prefix"] == "reset"
        assert receipt["in_flight"] == "recomputed"
        read = await admin.http.get("/v1/experts/0/0")
        assert parse(read.content) == expert_parts(5)


async def test_the_receipt_stays_under_the_transaction_and_the_version(tmp_path: Path) -> None:
    """A lost answer can be read again in both places."""
    async with running(tmp_path) as admin:
        receipt = (await admin.commit()).json()
        transaction = (await admin.http.get(f"/v1/transactions/{receipt['transaction']}")).json()
        assert (transaction["state"], transaction["receipt"]) == ("committed", receipt)
        assert (await admin.http.get("/v1/versions/1")).json()["receipt"] == receipt


async def test_a_commit_that_changes_nothing_takes_a_version(tmp_path: Path) -> None:
    """Sending the same weights again is a version of its own."""
    async with running(tmp_path) as admin:
        versions = [(await admin.commit(seed=1)).json()["version"] for _ in range(3)]
        assert versions == ["1", "2", "3"]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("when", ["before", "middle", "after"])
async def test_a_rank_that_fails_is_undone_on_all(tmp_path: Path, when: str, ranks: int) -> None:
    """503 commit_undone with every rank's answer; the old version serves; the next commit works."""
    async with running(tmp_path, ranks=ranks) as admin:
        admin.engine.faults.commit[ranks - 1] = when
        answer = await admin.commit()
        assert (answer.status_code, code(answer)) == (503, "commit_undone")
        told = answer.json()["ranks"]
        assert [(one["rank"], one["ok"]) for one in told] == [(n, n != ranks - 1) for n in range(ranks)]
        assert told[-1]["error"]["code"] == "internal"
        assert is_base(admin.engine)
        assert await admin.version() == "0"
        (transaction,) = (await admin.http.get("/v1/transactions")).json()["transactions"]
        assert (transaction["state"], transaction["problem"]["code"]) == ("failed", "commit_undone")
        assert admin.files == []
        assert (await admin.http.get("/health/ready")).status_code == 200
        admin.engine.faults.commit.clear()
        assert await works(admin, "1")


async def test_a_cache_that_is_not_reset_undoes_the_commit(tmp_path: Path) -> None:
    """Weights never change under a cache of the old ones."""
    async with running(tmp_path) as admin:
        admin.engine.faults.cache = True
        answer = await admin.commit()
        assert code(answer) == "commit_undone"
        assert answer.json()["caches"]["prefix"] == "failed"
        assert is_base(admin.engine)


@pytest.mark.parametrize("fault", ["undo", "missing", "boast"])
async def test_what_could_not_be_undone_is_unknown(tmp_path: Path, fault: str) -> None:
    """500 state_unknown; from then on the service is not ready and refuses every change."""
    async with running(tmp_path, ranks=2) as admin:
        other = await admin.open()
        await admin.upload(other)
        if fault == "undo":
            admin.engine.faults.commit[1] = "middle"
            admin.engine.faults.undo.add(1)
        elif fault == "missing":
            admin.engine.faults.missing.add(1)
        else:
            admin.engine.faults.cache = admin.engine.faults.boast = True
        answer = await admin.commit()
        assert (answer.status_code, code(answer)) == (500, "state_unknown")
        assert await admin.version() == "0"
        ready = await admin.http.get("/health/ready")
        assert (ready.status_code, code(ready)) == (503, "state_unknown")
        assert (await admin.http.get("/health/live")).status_code == 200
        refused = [
            await admin.http.post(f"{other}/commit"),
            await admin.http.post(f"{other}/prepare"),
            await admin.http.post("/v1/rollback", json={"to_version": 0}),
            await admin.http.post("/v1/transactions"),
            await admin.upload(other),
            await admin.http.put("/v1/baselines/b"),
            await admin.http.put("/v1/experts/0/0", content=expert_body(), headers=OCTETS),
            await admin.http.post("/v1/patches", content=q_proj_body(), headers=OCTETS),
        ]
        assert [code(one) for one in refused] == ["state_unknown"] * len(refused)
        await asyncio.sleep(0.1)  # polling the same engine again must not make it known
        assert code(await admin.http.get("/health/ready")) == "state_unknown"
        status = (await admin.http.get("/v1/status")).json()
        assert status["writable"] is False


async def test_a_new_engine_at_the_current_version_is_known_again(tmp_path: Path) -> None:
    """A restarted engine with base weights suits a history that is still at its base."""
    async with running(tmp_path, ranks=2) as admin:
        admin.engine.faults.missing.add(0)
        assert code(await admin.commit()) == "state_unknown"
        admin.engine.faults.missing.clear()
        admin.engine.restart()
        await until(lambda: admin.service.link.problem is None)
        assert await works(admin, "1")


async def test_a_restarted_engine_behind_the_history_is_brought_to_it(tmp_path: Path) -> None:
    """Nobody builds on base weights when the history says otherwise: the undo is gone, no weight is."""
    async with running(tmp_path) as admin:
        assert await works(admin, "1")
        before = [bits.tobytes() for bits in admin.engine.ranks[0].weights.values()]
        admin.engine.restart()
        await until(lambda: admin.engine.ranks[0].version == 1 and not admin.service.link.problem)
        assert [bits.tobytes() for bits in admin.engine.ranks[0].weights.values()] == before
        versions = (await admin.http.get("/v1/versions")).json()["versions"]
        assert [one["held"] for one in versions] == [False, True]
        assert await works(admin, "2")


async def test_an_engine_that_restarts_within_a_commit_is_unknown(tmp_path: Path) -> None:
    """An answer from other boot ids does not count."""
    async with running(tmp_path, engine_poll_s=60) as admin:
        commit = admin.engine.faults.hold = asyncio.Event()
        task = asyncio.create_task(admin.commit())
        await until(lambda: "commit" in admin.engine.calls)
        prepared = admin.engine.ranks[0].prepared
        admin.engine.restart()
        admin.engine.ranks[0].prepared = prepared
        commit.set()
        assert code(await task) == "state_unknown"


async def test_an_engine_found_again_within_a_commit_is_known_again(tmp_path: Path) -> None:
    """The commit that the restart cut short is unknown; the new engine, at the history's base, is not."""
    async with running(tmp_path) as admin:
        hold = admin.engine.faults.hold = asyncio.Event()
        task = asyncio.create_task(admin.commit())
        await until(lambda: "commit" in admin.engine.calls)
        prepared = admin.engine.ranks[0].prepared
        admin.engine.restart()
        await until(lambda: (e := admin.service.link.engine) and e.boots == {0: "boot-2-0"})
        admin.engine.ranks[0].prepared = prepared
        admin.engine.faults.commit[0] = "before"
        hold.set()
        assert code(await task) == "state_unknown"
        admin.engine.faults.commit.clear()
        await until(lambda: admin.service.link.problem is None)
        assert await works(admin, "1")


async def test_an_engine_that_restarts_before_a_commit_is_unavailable(tmp_path: Path) -> None:
    """Boot ids are compared before anything is asked of the engine."""
    async with running(tmp_path, engine_poll_s=60) as admin:
        transaction = await admin.open()
        await admin.upload(transaction)
        admin.engine.restart()
        assert code(await admin.http.post(f"{transaction}/commit")) == "engine_unavailable"
        assert "prepare" not in admin.engine.calls
        assert (await admin.http.get(transaction)).json()["state"] == "open"


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ({0: Code.UNDO_BUDGET, 1: Code.UNDO_BUDGET}, "undo_budget"),
        ({1: Code.ENGINE_MEMORY}, "engine_memory"),
        ({1: Code.TENSOR_UNSUPPORTED}, "tensor_unsupported"),
        ({1: Code.INTERNAL}, "prepare_failed"),
        ({0: Code.UNDO_BUDGET, 1: Code.INTERNAL}, "prepare_failed"),
    ],
)
async def test_prepare_can_fail(tmp_path: Path, errors: dict[int, Code], expected: str) -> None:
    """The ranks' own refusal if they agree on one, else prepare_failed; the transaction stays open."""
    async with running(tmp_path, ranks=2) as admin:
        admin.engine.faults.prepare = {n: RankError(code=c, detail="a fault") for n, c in errors.items()}
        transaction = await admin.open()
        await admin.upload(transaction)
        for step in ("prepare", "commit"):
            answer = await admin.http.post(f"{transaction}/{step}")
            assert code(answer) == expected
            assert [one["ok"] for one in answer.json()["ranks"]] == [n not in errors for n in range(2)]
        assert (await admin.http.get(transaction)).json()["state"] == "open"
        assert not any(rank.prepared for rank in admin.engine.ranks)
        assert "commit" not in admin.engine.calls
        admin.engine.faults.prepare.clear()
        assert (await admin.http.post(f"{transaction}/commit")).json()["version"] == "1"


async def test_a_disk_that_is_full_at_the_last_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads are made durable before the engine is asked; if that fails it is 507 and nothing happened."""

    def full(files: list[StagedFile]) -> None:
        assert len(files) == 1
        raise ProblemError(Code.DISK_FULL, "no room")

    async with running(tmp_path) as admin:
        transaction = await admin.open()
        await admin.upload(transaction)
        with monkeypatch.context() as patch:
            patch.setattr("app.changes.fsync_all", full)
            answer = await admin.http.post(f"{transaction}/commit")
        assert (answer.status_code, code(answer)) == (507, "disk_full")
        assert "prepare" not in admin.engine.calls
        assert (await admin.http.post(f"{transaction}/commit")).json()["version"] == "1"


async def test_an_answer_to_another_question_does_not_count(tmp_path: Path) -> None:
    """A wrong nonce at prepare changes nothing; at commit the engine is asked what it really did."""
    async with running(tmp_path) as admin:
        admin.engine.faults.nonce = True
        transaction = await admin.open()
        await admin.upload(transaction)
        assert code(await admin.http.post(f"{transaction}/commit")) == "engine_unavailable"
        admin.engine.faults.nonce = False
        await admin.http.post(f"{transaction}/prepare")
        admin.engine.faults.nonce = True
        receipt = await admin.http.post(f"{transaction}/commit")
        assert (receipt.status_code, receipt.json()["version"]) == (200, "1")
        assert "lost" in receipt.json()["note"]
        assert admin.engine.ranks[0].version == 1


async def test_a_lost_answer_of_a_done_commit_is_found_out(tmp_path: Path) -> None:
    """Every rank reports the new version, so the commit is done and says so."""
    async with running(tmp_path, ranks=2) as admin:
        admin.line.cuts["commit"] = "after"
        answer = await admin.commit()
        assert (answer.status_code, answer.json()["version"]) == (200, "1")
        assert admin.engine.calls.count("commit") == 1
        admin.line.cuts.clear()
        assert (await admin.http.get("/health/ready")).json()["version"] == "1"
        assert await works(admin, "2")


async def test_a_lost_answer_of_an_undone_commit_is_found_out(tmp_path: Path) -> None:
    """Every rank reports the old version and nothing prepared: undone for sure."""
    async with running(tmp_path, ranks=2) as admin:
        admin.engine.faults.commit[0] = "after"
        admin.line.cuts["commit"] = "after"
        assert code(await admin.commit()) == "commit_undone"
        assert is_base(admin.engine)
        admin.line.cuts.clear()
        admin.engine.faults.commit.clear()
        assert await works(admin, "1")


async def test_a_lost_question_is_taken_back(tmp_path: Path) -> None:
    """What never arrived can't arrive later: the prepared work is dropped before it is called undone."""
    async with running(tmp_path) as admin:
        admin.line.cuts["commit"] = "before"
        assert code(await admin.commit()) == "commit_undone"
        assert not admin.engine.ranks[0].prepared
        admin.line.cuts.clear()
        assert await works(admin, "1")


async def test_a_commit_that_is_slower_than_its_bound_is_waited_for(tmp_path: Path) -> None:
    """An engine that is alive and has the work in hand is not robbed of it."""
    async with running(tmp_path, engine_commit_s=0.05) as admin:
        hold = admin.engine.faults.hold = asyncio.Event()
        asyncio.get_running_loop().call_later(0.15, hold.set)
        answer = await admin.commit()
        assert (answer.status_code, answer.json()["version"]) == (200, "1")
        assert "drop" not in admin.engine.calls


async def test_an_engine_that_is_gone_after_the_question_is_unknown(tmp_path: Path) -> None:
    """Without an answer from every rank nothing is assumed."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        await admin.upload(transaction)
        admin.engine.faults.hold = asyncio.Event()
        task = asyncio.create_task(admin.http.post(f"{transaction}/commit"))
        await until(lambda: "commit" in admin.engine.calls)
        admin.line.cuts["*"] = "refused"
        admin.line.cuts["commit"] = "after"
        admin.engine.faults.hold.set()
        assert code(await task) == "state_unknown"


async def test_a_hanging_commit_is_given_up_and_unknown(tmp_path: Path) -> None:
    """The wait for a commit is bounded; an engine that answers nothing is unknown."""
    async with running(tmp_path, engine_commit_s=0.1) as admin:
        transaction = await admin.open()
        await admin.upload(transaction)
        await admin.http.post(f"{transaction}/prepare")
        silence = asyncio.Event()
        admin.engine.faults.hold = silence
        task = asyncio.create_task(admin.http.post(f"{transaction}/commit"))
        await until(lambda: "commit" in admin.engine.calls)
        admin.engine.faults.silent = silence
        assert code(await task) == "state_unknown"
        assert (await admin.http.get("/health/live")).status_code == 200
        silence.set()


async def test_an_engine_that_was_never_asked_leaves_the_transaction_prepared(tmp_path: Path) -> None:
    """A refused connection at commit changes nothing; trying again works."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        await admin.upload(transaction)
        admin.line.cuts["commit"] = "refused"
        assert code(await admin.http.post(f"{transaction}/commit")) == "engine_unavailable"
        admin.line.cuts.clear()
        assert (await admin.http.post(f"{transaction}/commit")).json()["version"] == "1"


async def test_an_engine_at_another_version_is_not_built_on(tmp_path: Path) -> None:
    """Weights that somebody else changed make the state unknown; nothing is written."""
    async with running(tmp_path, ranks=2) as admin:
        admin.engine.ranks[1].version = 5
        assert code(await admin.http.get("/health/ready")) == "recovering"
        assert code(await admin.commit()) == "state_unknown"
        assert is_base(admin.engine)


async def test_of_eight_commits_at_once_one_wins_at_a_time(tmp_path: Path) -> None:
    """While one commit holds, every other is refused busy at once; uploads go on; then the next one works."""
    async with running(tmp_path) as admin:
        opened = [await admin.open() for _ in range(8)]
        for transaction in opened:
            await admin.upload(transaction)
        hold = admin.engine.faults.hold = asyncio.Event()
        tasks = [asyncio.create_task(admin.http.post(f"{one}/commit")) for one in opened]
        await until(lambda: sum(task.done() for task in tasks) == 7)
        busy = [task.result() for task in tasks if task.done()]
        assert [code(one) for one in busy] == ["busy"] * 7
        assert code(await admin.http.post("/v1/rollback", json={"to_version": 0})) == "busy"
        late = await admin.open()
        assert (await admin.upload(late)).status_code == 200
        assert (await admin.http.get("/health/ready")).status_code == 200
        now = await admin.http.put("/v1/experts/0/0", content=expert_body(), headers=OCTETS)
        assert code(now) == "busy"
        hold.set()
        done = [task.result() for task in (await asyncio.wait(tasks))[0] if task.result().status_code == 200]
        assert [one.json()["version"] for one in done] == ["1"]
        assert (await admin.http.post(f"{late}/commit")).json()["version"] == "2"
        states = [one["state"] for one in (await admin.http.get("/v1/transactions")).json()["transactions"]]
        assert sorted(states) == ["committed"] * 2 + ["open"] * 7


async def test_a_transaction_in_its_commit_takes_nothing(tmp_path: Path) -> None:
    """Uploads, prepare and abort are refused while it commits."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        await admin.upload(transaction)
        hold = admin.engine.faults.hold = asyncio.Event()
        task = asyncio.create_task(admin.http.post(f"{transaction}/commit"))
        await until(lambda: "commit" in admin.engine.calls)
        for answer in (
            await admin.upload(transaction),
            await admin.http.post(f"{transaction}/prepare"),
            await admin.http.delete(transaction),
        ):
            assert code(answer) == "transaction_state"
        assert code(await admin.http.post(f"{transaction}/commit")) == "busy"
        hold.set()
        assert (await task).status_code == 200


async def test_work_prepared_on_a_moved_version_is_prepared_again(tmp_path: Path) -> None:
    """Without base_version the commit prepares anew; with it, 409."""
    async with running(tmp_path) as admin:
        free, bound = await admin.open(), await admin.open(base_version=0)
        for transaction in (free, bound):
            await admin.upload(transaction, seed=3)
            assert (await admin.http.post(f"{transaction}/prepare")).status_code == 200
        assert await works(admin, "1")
        before = admin.engine.calls.count("prepare")
        moved = await admin.http.post(f"{bound}/commit")
        assert (moved.status_code, code(moved), moved.json()["current"]) == (409, "version_moved", "1")
        assert (await admin.http.get(bound)).json()["state"] == "prepared"
        answer = (await admin.http.post(f"{free}/commit")).json()
        assert (answer["version"], answer["base_version"]) == ("2", "1")
        assert admin.engine.calls.count("prepare") == before + 1


async def test_prepared_work_that_could_not_be_dropped_is_not_used(tmp_path: Path) -> None:
    """An upload after a prepare is part of the commit, though the engine still holds the older work."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        await admin.upload(transaction, seed=1, expert=0)
        await admin.http.post(f"{transaction}/prepare")
        admin.line.cuts["drop"] = "before"
        await admin.upload(transaction, seed=2, expert=1)
        assert admin.engine.ranks[0].prepared
        assert (await admin.http.get(transaction)).json()["preparation"] is None
        assert (await admin.http.post(f"{transaction}/commit")).json()["experts"] == 2
        assert parse((await admin.http.get("/v1/experts/0/1")).content) == expert_parts(2)


async def test_a_commit_overtakes_a_prepare(tmp_path: Path) -> None:
    """A prepare that a commit overtakes is done again on the new version, without an error."""
    async with running(tmp_path) as admin:
        slow, fast = await admin.open(), await admin.open()
        for transaction in (slow, fast):
            await admin.upload(transaction)
        await admin.http.post(f"{fast}/prepare")
        hold = admin.engine.faults.hold_prepare = asyncio.Event()
        task = asyncio.create_task(admin.http.post(f"{slow}/prepare"))
        await until(lambda: admin.engine.calls.count("prepare") == 2)
        assert (await admin.http.post(f"{fast}/commit")).status_code == 200
        hold.set()
        answer = await task
        assert (answer.status_code, answer.json()["version"]) == (200, "1")


@pytest.mark.parametrize("base", [0, 2, "5"])
async def test_base_version_behind_or_ahead_is_409_at_once(tmp_path: Path, base: int | str) -> None:
    """Opening on a version that is not the current one is refused with the current one."""
    async with running(tmp_path) as admin:
        assert await works(admin, "1")
        opened = await admin.http.post("/v1/transactions", json={"base_version": base})
        one_shot = await admin.http.put(
            f"/v1/experts/0/0?base_version={base}", content=expert_body(), headers=OCTETS
        )
        for answer in (opened, one_shot):
            assert (code(answer), answer.json()["current"]) == ("version_moved", "1")


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ('"1"', 200),
        ("*", 200),
        ('"0", "1"', 200),
        ('"0"', 412),
        ('W/"1"', 412),
        ('"01"', 412),
        ("1", 400),
        ('"1" "2"', 400),
        ("", 400),
    ],
)
async def test_if_match(tmp_path: Path, header: str, status: int) -> None:
    """Only a strong tag of the current version, or `*`, lets a change through, on every route."""
    headers = {"if-match": header}
    async with running(tmp_path) as admin:
        for route in ("commit", "expert", "patches", "rollback"):
            if (await admin.version()) == "0":
                await admin.commit()
            transaction = await admin.open()
            await admin.upload(transaction)
            if route == "commit":
                answer = await admin.http.post(f"{transaction}/commit", headers=headers)
            elif route == "expert":
                answer = await admin.http.put(
                    "/v1/experts/0/0", content=expert_body(), headers=OCTETS | headers
                )
            elif route == "patches":
                answer = await admin.http.post("/v1/patches", content=q_proj_body(), headers=OCTETS | headers)
            else:
                answer = await admin.http.post("/v1/rollback", json={"to_version": 0}, headers=headers)
            assert answer.status_code == status, route
            if status == 200:
                headers = {"if-match": header.replace('"1"', answer.headers["etag"])}


async def test_one_shot_routes_upload_and_commit(tmp_path: Path) -> None:
    """One request is a whole transaction, with the same options as query parameters."""
    async with running(tmp_path) as admin:
        expert = await admin.http.put(
            "/v1/experts/1/2?label=e&base_version=0&expires_in_s=5", content=expert_body(8), headers=OCTETS
        )
        batch = await admin.http.post("/v1/patches?label=p", content=q_proj_body(), headers=OCTETS)
        assert [one.json()["version"] for one in (expert, batch)] == ["1", "2"]
        assert (expert.headers["etag"], expert.json()["label"]) == ('"1"', "e")
        assert parse((await admin.http.get("/v1/experts/1/2")).content) == expert_parts(8)
        assert admin.files == []


async def test_a_refused_one_shot_leaves_no_transaction_open(tmp_path: Path) -> None:
    """A bad body or a failing commit leaves neither file nor open transaction."""
    async with running(tmp_path) as admin:
        bad = await admin.http.post("/v1/patches", content=expert_body(), headers=OCTETS)
        assert code(bad) == "unknown_tensor"
        admin.engine.faults.prepare[0] = RankError(code=Code.INTERNAL, detail="a fault")
        failed = await admin.http.post("/v1/patches", content=q_proj_body(), headers=OCTETS)
        assert code(failed) == "prepare_failed"
        assert admin.files == []
        assert not admin.service.transactions.live()
        assert await admin.version() == "0"


async def test_the_engine_is_asked_for_the_version_that_was_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recovery looks for the intent's version, so that is the one to ask for, whatever the ledger says."""
    asked: list[int] = []
    intend = Committer.intend

    async def intend_seven(committer: Committer, change: Change, *rest: Any) -> Intent:
        return await intend(committer, change.model_copy(update={"version": 7}), *rest)

    async def refuse(link: Any, boots: Any, prepared: Any, version: int, flight: Any) -> None:
        asked.append(version)
        raise ProblemError(Code.COMMIT_UNDONE, "That is all that is looked at here.")

    monkeypatch.setattr(Committer, "intend", intend_seven)
    monkeypatch.setattr(outcome, "commit", refuse)
    async with running(tmp_path) as admin:
        assert code(await admin.commit()) == "commit_undone"
    assert asked == [7]
