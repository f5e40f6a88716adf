"""The mode for running requests: carried to the engine from every request that changes weights."""

import asyncio
from pathlib import Path

import pytest

from schemas.problems import Code
from tests.fakes.admin import OCTETS, Admin, code, q_proj_body, running

pytestmark = pytest.mark.anyio

MODES = {"recompute": "recomputed", "wait": "finished", "abort": "aborted", "keep": "kept"}
NOT_BEGUN = [Code.DRAFT_MODEL, Code.ENGINE_ASLEEP, Code.DRAIN_TIMEOUT, Code.NOT_SUPPORTED]


def last(admin: Admin) -> tuple[str, float]:
    """What the engine was asked to do with running requests."""
    request = admin.engine.commits[-1]
    return request.in_flight, request.drain_timeout_s


@pytest.mark.parametrize("mode", MODES)
async def test_every_way_to_commit_carries_the_mode(tmp_path: Path, mode: str) -> None:
    """A transaction, a one-request upload and a rollback; the receipt says what happened."""
    async with running(tmp_path, drain_s=7) as admin:
        options = {"in_flight": mode, "drain_timeout_s": 3}
        committed = await admin.commit(**options)
        assert last(admin) == (mode, 3.0)
        patched = await admin.http.post(
            f"/v1/patches?in_flight={mode}", content=q_proj_body(), headers=OCTETS
        )
        assert last(admin) == (mode, 7.0)
        rolled = await admin.http.post("/v1/rollback", json={"to_version": 0} | options)
        assert last(admin) == (mode, 3.0)
        for answer in (committed, patched, rolled):
            receipt = answer.json()
            assert receipt["in_flight"] == MODES[mode]
            assert receipt["caches"]["prefix"] == ("mixed" if mode == "keep" else "reset")


async def test_recompute_is_the_default(tmp_path: Path) -> None:
    """Nobody loses a request without asking for it."""
    async with running(tmp_path) as admin:
        await admin.commit()
        assert last(admin) == ("recompute", 60.0)
        await admin.http.post("/v1/rollback", json={"to_version": 0})
        assert last(admin) == ("recompute", 60.0)


@pytest.mark.parametrize("reason", NOT_BEGUN)
async def test_a_commit_that_is_not_begun_can_be_tried_again(tmp_path: Path, reason: Code) -> None:
    """The engine's code and reason are the answer; uploads stay, no version is used, the next try works."""
    async with running(tmp_path) as admin:
        transaction = await admin.open(in_flight="wait")
        await admin.upload(transaction)
        admin.engine.faults.refuse = reason
        answer = await admin.http.post(f"{transaction}/commit")
        assert code(answer) == reason
        assert "a fake reason" in answer.json()["detail"]
        assert (await admin.http.get(transaction)).json()["state"] == "prepared"
        assert code(await admin.http.post("/v1/rollback", json={"to_version": 0})) == reason
        assert await admin.version() == "0" and not admin.service.link.unknown
        assert not any(rank.prepared for rank in admin.engine.ranks)
        admin.engine.faults.refuse = None
        assert (await admin.http.post(f"{transaction}/commit")).json()["version"] == "1"


async def test_a_paused_engine_is_not_even_prepared(tmp_path: Path) -> None:
    """Somebody else paused it: nothing is asked of it until they let it go on."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        await admin.upload(transaction)
        admin.engine.paused = True
        assert code(await admin.http.post(f"{transaction}/commit")) == "engine_asleep"
        assert code(await admin.http.post("/v1/rollback", json={"to_version": 0})) == "engine_asleep"
        assert not {"prepare", "commit"} & set(admin.engine.calls)
        admin.engine.paused = False
        assert (await admin.http.post(f"{transaction}/commit")).status_code == 200


async def test_a_lost_answer_is_looked_for_as_long_as_requests_may_run(tmp_path: Path) -> None:
    """The engine waits for its requests; that it still does is no sign of an unknown state."""
    async with running(tmp_path, engine_settle_s=0.2) as admin:
        hold = admin.engine.faults.hold = asyncio.Event()
        admin.line.cuts["commit"] = "late"
        waiting = asyncio.create_task(admin.commit(in_flight="wait", drain_timeout_s=30))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        hold.set()
        receipt = (await waiting).json()
        assert (receipt["version"], await admin.version()) == ("1", "1")
