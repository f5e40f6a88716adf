"""Finding the engine: what it says may be wrong, and the watch goes on."""

import asyncio
from pathlib import Path

import pytest

from schemas import bridge
from tests.fakes.admin import asleep, code, running, until
from tests.fakes.engine import FakeEngine, Line

pytestmark = pytest.mark.anyio


async def test_an_engine_that_talks_nonsense_is_not_attached(
    tmp_path: Path,
) -> None:
    """Undo under a name that is no version stops the attaching, not the watch: mended, it is attached."""
    engine = FakeEngine()
    engine.ranks[0].undo = {"x": []}  # type: ignore[dict-item]  # the nonsense
    async with asleep(tmp_path, Line(engine)) as admin:
        await until(lambda: "not understood" in (admin.service.link.problem or ""))
        engine.ranks[0].undo = {}
        await until(lambda: admin.service.link.problem is None)


async def test_another_protocol_is_refused_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of another release says which protocol it speaks, and that is told."""
    theirs = bridge.PROTOCOL
    monkeypatch.setattr("schemas.bridge.PROTOCOL", theirs + 1)
    async with asleep(tmp_path, Line(FakeEngine())) as admin:
        await until(lambda: f"protocol {theirs}" in (admin.service.link.problem or ""))
        assert code(await admin.http.get("/v1/model")) == "engine_unavailable"


async def test_an_unreadable_secret_is_told(tmp_path: Path) -> None:
    """A folder in place of the secret file does not end the watch."""
    async with asleep(tmp_path, Line(FakeEngine(secret="s")), engine_secret_file=tmp_path) as admin:
        await until(lambda: "secret file" in (admin.service.link.problem or ""))


async def test_ranks_of_different_versions_are_unknown(tmp_path: Path) -> None:
    """An engine that was left half way is not adopted."""
    engine = FakeEngine(ranks=2)
    engine.ranks[1].version = 1
    async with running(tmp_path, engine=engine) as admin:
        ready = await admin.http.get("/health/ready")
        assert (ready.status_code, code(ready)) == (503, "state_unknown")
        assert code(await admin.http.post("/v1/transactions")) == "state_unknown"


async def test_an_ended_engine_is_not_held_against_the_next(tmp_path: Path) -> None:
    """Who finds out late that the old engine's state is unknown does not have the new one replaced, too."""
    async with running(tmp_path) as admin:
        link = admin.service.link
        old = link.require().boots
        link.mark_unknown("a fault", old)
        assert link.unknown
        link.expect_another()
        admin.engine.restart()
        await until(lambda: link.engine is not None and link.engine.boots != old and not link.problem)
        link.mark_unknown("found out late", old)
        assert link.problem is None


async def test_a_restarted_engine_is_attached_again(tmp_path: Path) -> None:
    """At the base of the history a new engine is as good as the old one; prepared work is prepared again."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        await admin.upload(transaction)
        await admin.http.post(f"{transaction}/prepare")
        admin.engine.restart()
        await until(lambda: (e := admin.service.link.engine) and e.boots == {0: "boot-2-0"})
        await until(lambda: admin.settled)
        assert (await admin.http.post(f"{transaction}/commit")).json()["version"] == "1"
        assert admin.engine.calls.count("prepare") == 2


async def test_an_engine_that_answers_nothing_is_hung(tmp_path: Path) -> None:
    """Silence for longer than the bound counts, until there is an answer again."""
    async with running(tmp_path, engine_answer_s=0.05, engine_hang_s=0.2) as admin:
        link, faults = admin.service.link, admin.engine.faults
        await asyncio.sleep(0.4)
        assert not link.hung
        faults.silent = asyncio.Event()
        await until(lambda: link.hung)
        assert link.client.silent_s > 0.2
        faults.silent.set()
        await until(lambda: link.reachable)
        assert not link.hung and link.client.silent_s == 0


async def test_an_engine_that_is_not_there_is_not_hung(tmp_path: Path) -> None:
    """Refused connections are no silence: that an engine has ended is noticed otherwise."""
    async with running(tmp_path, engine_answer_s=0.05, engine_hang_s=0.2) as admin:
        admin.line.cuts["*"] = "refused"
        await until(lambda: not admin.service.link.reachable)
        await asyncio.sleep(0.4)
        assert admin.service.link.client.silent_s == 0


async def test_an_engine_may_be_silent_in_a_commit(tmp_path: Path) -> None:
    """How long a commit takes has a bound of its own."""
    async with running(tmp_path, engine_answer_s=0.05, engine_hang_s=0.1) as admin:
        link, faults = admin.service.link, admin.engine.faults
        faults.hold = asyncio.Event()
        commit = asyncio.create_task(admin.commit())
        await until(lambda: admin.engine.commits)
        faults.silent = asyncio.Event()
        await until(lambda: link.client.silent_s > 0.2)
        assert not link.hung
        faults.silent.set()
        faults.hold.set()
        assert (await commit).status_code == 200
        assert not link.hung
