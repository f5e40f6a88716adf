"""Changes that are followed by an id instead of waited for."""

import asyncio
from pathlib import Path

import pytest

from tests.fakes.admin import Admin, asleep, code, running, until
from tests.fakes.engine import FakeEngine, Line

pytestmark = pytest.mark.anyio

ASYNC = {"prefer": "respond-async"}


async def ended(admin: Admin, location: str) -> dict[str, object]:
    """The operation once it does not run any more."""
    await until(lambda: admin.service.operations.get(location.rpartition("/")[2]).state != "running")
    return dict((await admin.http.get(location)).json())


async def test_a_commit_can_be_followed(tmp_path: Path) -> None:
    """202 with a Location at once; there the receipt, once it is done, also after a restart."""
    engine = FakeEngine()
    async with running(tmp_path, engine=engine) as admin:
        transaction = await admin.open()
        await admin.upload(transaction)
        hold = engine.faults.hold = asyncio.Event()
        answer = await admin.http.post(f"{transaction}/commit", headers={"prefer": "wait=5, respond-async"})
        assert (answer.status_code, answer.headers["preference-applied"]) == (202, "respond-async")
        location = answer.headers["location"]
        assert (await admin.http.get(location)).json() == answer.json()
        assert answer.json()["state"] == "running"
        await until(lambda: "commit" in engine.calls)
        refused = await admin.http.post("/v1/rollback", json={"to_version": 0}, headers=ASYNC)
        assert code(refused) == "busy"
        hold.set()
        view = await ended(admin, location)
        assert view["state"] == "done"
        assert view["receipt"] == (await admin.http.get("/v1/versions/1")).json()["receipt"]
    async with running(tmp_path, engine=engine) as admin:
        assert (await admin.http.get(location)).json() == view


async def test_a_rollback_can_be_followed(tmp_path: Path) -> None:
    """The same for a rollback; its key gets the same operation again."""
    async with running(tmp_path) as admin:
        await admin.commit()
        headers = ASYNC | {"idempotency-key": "k"}
        answers = [
            await admin.http.post("/v1/rollback", json={"to_version": 0}, headers=headers) for _ in range(2)
        ]
        assert answers[0].headers["location"] == answers[1].headers["location"]
        view = await ended(admin, answers[0].headers["location"])
        assert (view["kind"], view["state"]) == ("rollback", "done")
        assert await admin.version() == "2"


async def test_a_failure_is_told_to_who_follows(tmp_path: Path) -> None:
    """The problem stands under the operation, as it would have been answered."""
    async with running(tmp_path, ranks=2) as admin:
        transaction = await admin.open()
        await admin.upload(transaction)
        admin.engine.faults.commit[1] = "middle"
        answer = await admin.http.post(f"{transaction}/commit", headers=ASYNC)
        view = await ended(admin, answer.headers["location"])
        assert view["state"] == "failed"
        assert view["problem"] == (await admin.http.get(transaction)).json()["problem"]


async def test_what_a_restart_cut_short_is_settled(tmp_path: Path) -> None:
    """An operation is done after a restart if the engine did its commit, else it has failed."""
    for answer, state in (("after", "done"), ("before", "failed")):
        engine = FakeEngine()
        line = Line(engine)
        folder = tmp_path / answer
        async with asleep(folder, line, engine_settle_s=0.2) as admin:
            await until(lambda found=admin: found.settled)
            transaction = await admin.open()
            await admin.upload(transaction)
            line.cuts, line.then = {"commit": answer}, "refused"
            location = (await admin.http.post(f"{transaction}/commit", headers=ASYNC)).headers["location"]
            await ended(admin, location)
        async with running(folder, engine=engine, engine_settle_s=0.4) as admin:
            view = await ended(admin, location)
            assert view["state"] == state
            assert await admin.version() == ("1" if state == "done" else "0")


async def test_unknown_operations(tmp_path: Path) -> None:
    """404 with a code of its own."""
    async with running(tmp_path) as admin:
        answer = await admin.http.get("/v1/operations/none")
        assert (answer.status_code, code(answer)) == (404, "unknown_operation")


async def test_old_operations_are_forgotten(tmp_path: Path) -> None:
    """Only so many ended ones stay readable."""
    async with running(tmp_path, operations=1) as admin:
        locations = []
        for _ in range(3):
            answer = await admin.http.post("/v1/rollback", json={"to_version": 0}, headers=ASYNC)
            locations.append(answer.headers["location"])
            await ended(admin, locations[-1])
        statuses = [(await admin.http.get(location)).status_code for location in locations]
        assert statuses == [404, 200, 200]
