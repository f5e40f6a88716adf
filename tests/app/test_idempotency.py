"""Requests that are sent again: the first answer, once."""

import asyncio
from pathlib import Path

import pytest

from schemas.bridge import RankError
from schemas.problems import Code
from tests.fakes.admin import OCTETS, asleep, code, expert_body, q_proj_body, running, until
from tests.fakes.engine import FakeEngine, Line

pytestmark = pytest.mark.anyio

KEY = {"idempotency-key": "k-1"}


async def test_opening_twice_opens_once(tmp_path: Path) -> None:
    """Same key and body: the same transaction, the same Location."""
    async with running(tmp_path) as admin:
        first = await admin.http.post("/v1/transactions", json={"label": "x"}, headers=KEY)
        second = await admin.http.post("/v1/transactions", json={"label": "x"}, headers=KEY)
        assert (second.status_code, second.content) == (201, first.content)
        assert second.headers["location"] == first.headers["location"]
        assert len(admin.service.transactions.all()) == 1


@pytest.mark.parametrize("other", [{"label": "y"}, {}])
async def test_another_body_is_a_mismatch(tmp_path: Path, other: dict[str, str]) -> None:
    """A key belongs to one request."""
    async with running(tmp_path) as admin:
        await admin.http.post("/v1/transactions", json={"label": "x"}, headers=KEY)
        assert (
            code(await admin.http.post("/v1/transactions", json=other, headers=KEY)) == "idempotency_mismatch"
        )
        rollback = await admin.http.post("/v1/rollback", json={"to_version": 0}, headers=KEY)
        assert (rollback.status_code, code(rollback)) == (422, "idempotency_mismatch")


async def test_commit_and_rollback_replay_their_receipts(tmp_path: Path) -> None:
    """The change is made once, though the transaction has ended when the request comes again."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        await admin.upload(transaction)
        answers = [await admin.http.post(f"{transaction}/commit", headers=KEY) for _ in range(2)]
        assert answers[0].content == answers[1].content
        assert answers[1].headers["etag"] == '"1"'
        back = {"idempotency-key": "k-2"}
        for _ in range(2):
            answer = await admin.http.post("/v1/rollback", json={"to_version": 0}, headers=back)
            assert answer.json()["version"] == "2"
        assert admin.engine.calls.count("commit") == 2


async def test_uploads_replay_by_their_bytes(tmp_path: Path) -> None:
    """The same bytes get the first answer, even after the commit; others are a mismatch; no file stays."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        path = f"{transaction}/experts/0/0"
        first = await admin.http.put(path, content=expert_body(1), headers=OCTETS | KEY)
        again = await admin.http.put(path, content=expert_body(1), headers=OCTETS | KEY)
        assert (again.status_code, again.content) == (200, first.content)
        other = await admin.http.put(path, content=expert_body(2), headers=OCTETS | KEY)
        assert code(other) == "idempotency_mismatch"
        assert len(admin.files) == 1
        await admin.http.post(f"{transaction}/commit")
        late = await admin.http.put(path, content=expert_body(1), headers=OCTETS | KEY)
        assert (late.status_code, late.content) == (200, first.content)
        assert admin.files == []
        assert admin.service.staging.budget.used == 0


async def test_one_shots_commit_once(tmp_path: Path) -> None:
    """An upload that commits in the same request is done once, too."""
    async with running(tmp_path) as admin:
        for _ in range(2):
            answer = await admin.http.post("/v1/patches", content=q_proj_body(), headers=OCTETS | KEY)
            assert answer.json()["version"] == "1"
        other = await admin.http.post("/v1/patches?label=x", content=q_proj_body(), headers=OCTETS | KEY)
        assert code(other) == "idempotency_mismatch"


async def test_while_the_first_runs_the_second_is_told_to_wait(tmp_path: Path) -> None:
    """409 in_progress with Retry-After; afterwards the first answer."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        await admin.upload(transaction)
        hold = admin.engine.faults.hold = asyncio.Event()
        task = asyncio.create_task(admin.http.post(f"{transaction}/commit", headers=KEY))
        await until(lambda: "commit" in admin.engine.calls)
        early = await admin.http.post(f"{transaction}/commit", headers=KEY)
        assert (early.status_code, code(early), early.headers["retry-after"]) == (409, "in_progress", "1")
        hold.set()
        first = await task
        assert (await admin.http.post(f"{transaction}/commit", headers=KEY)).content == first.content


async def test_failures_of_a_change_are_replayed_but_passing_ones_are_tried_again(tmp_path: Path) -> None:
    """commit_undone stays the answer of its key; a prepare that failed may go through the next time."""
    async with running(tmp_path) as admin:
        first, second = await admin.open(), await admin.open()
        for transaction in (first, second):
            await admin.upload(transaction)
        admin.engine.faults.commit[0] = "middle"
        for _ in range(2):
            assert code(await admin.http.post(f"{first}/commit", headers=KEY)) == "commit_undone"
        admin.engine.faults.commit.clear()
        assert code(await admin.http.post(f"{first}/commit", headers=KEY)) == "commit_undone"
        assert admin.engine.calls.count("commit") == 1
        again = {"idempotency-key": "k-2"}
        admin.engine.faults.prepare[0] = RankError(code=Code.INTERNAL, detail="a fault")
        assert code(await admin.http.post(f"{second}/commit", headers=again)) == "prepare_failed"
        admin.engine.faults.prepare.clear()
        assert (await admin.http.post(f"{second}/commit", headers=again)).status_code == 200


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb", "é"])
async def test_keys_are_printable_and_short(tmp_path: Path, key: str) -> None:
    """A malformed key is a 400 on JSON routes and uploads alike."""
    headers = [(b"idempotency-key", key.encode("latin-1"))]
    octets = [(b"content-type", b"application/octet-stream"), *headers]
    async with running(tmp_path) as admin:
        assert code(await admin.http.post("/v1/transactions", headers=headers)) == "bad_request"
        upload = await admin.http.put("/v1/experts/0/0", content=expert_body(), headers=octets)
        assert code(upload) == "bad_request"


async def test_old_answers_make_room(tmp_path: Path) -> None:
    """Only so many answers are kept; after that a key is new again."""
    async with running(tmp_path, idempotency_keys=2) as admin:
        for number in range(3):
            await admin.http.post("/v1/transactions", headers={"idempotency-key": str(number)})
        await admin.http.post("/v1/transactions", headers={"idempotency-key": "2"})
        assert len(admin.service.transactions.all()) == 3
        await admin.http.post("/v1/transactions", headers={"idempotency-key": "0"})
        assert len(admin.service.transactions.all()) == 4


async def test_answers_survive_a_restart(tmp_path: Path) -> None:
    """A restarted service gives the first answer to the byte, and does nothing again."""
    engine = FakeEngine()
    keys = [{"idempotency-key": name} for name in ("open", "commit", "one-shot", "back")]
    async with running(tmp_path, engine=engine) as admin:
        opened = await admin.http.post("/v1/transactions", json={}, headers=keys[0])
        transaction = opened.headers["location"]
        await admin.upload(transaction)
        first = [
            opened,
            await admin.http.post(f"{transaction}/commit", headers=keys[1]),
            await admin.http.post("/v1/patches", content=q_proj_body(), headers=OCTETS | keys[2]),
            await admin.http.post("/v1/rollback", json={"to_version": 0}, headers=keys[3]),
        ]
    async with running(tmp_path, engine=engine) as admin:
        again = [
            await admin.http.post("/v1/transactions", json={}, headers=keys[0]),
            await admin.http.post(f"{transaction}/commit", headers=keys[1]),
            await admin.http.post("/v1/patches", content=q_proj_body(), headers=OCTETS | keys[2]),
            await admin.http.post("/v1/rollback", json={"to_version": 0}, headers=keys[3]),
        ]
        for one, other in zip(first, again, strict=True):
            assert (one.status_code, one.content) == (other.status_code, other.content)
            assert one.headers.get("etag") == other.headers.get("etag")
        other_body = await admin.http.post("/v1/rollback", json={"to_version": 1}, headers=keys[3])
        assert code(other_body) == "idempotency_mismatch"
        assert await admin.version() == "3"


async def test_a_commit_whose_answer_was_never_given_is_answered_after_a_restart(tmp_path: Path) -> None:
    """The engine was changed, the admin ended before it knew: the key gets the receipt, not another."""
    engine = FakeEngine()
    line = Line(engine)
    async with asleep(tmp_path, line, engine_settle_s=0.2) as admin:
        await until(lambda: admin.settled)
        line.cuts, line.then = {"commit": "after"}, "refused"
        lost = await admin.http.post("/v1/patches", content=q_proj_body(), headers=OCTETS | KEY)
        assert lost.status_code == 500
    async with running(tmp_path, engine=engine) as admin:
        answer = await admin.http.post("/v1/patches", content=q_proj_body(), headers=OCTETS | KEY)
        assert (answer.status_code, answer.json()["version"], answer.headers["etag"]) == (200, "1", '"1"')
        assert await admin.version() == "1"


async def test_ten_parallel_retries_apply_once(tmp_path: Path) -> None:
    """All of them get the receipt or are told to wait; one version is made."""
    async with running(tmp_path) as admin:
        tries = [
            admin.http.post("/v1/patches", content=q_proj_body(), headers=OCTETS | KEY) for _ in range(10)
        ]
        answers = await asyncio.gather(*tries)
        done = [answer for answer in answers if answer.status_code == 200]
        assert {answer.json()["version"] for answer in done} == {"1"}
        assert {code(answer) for answer in answers if answer not in done} <= {"in_progress"}
        assert await admin.version() == "1"
