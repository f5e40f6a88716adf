"""Attaching to an engine that others started: it is proved to be at the base or at the current version."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.admin import OCTETS, asleep, code, expert_body, running, until
from tests.fakes.engine import FakeEngine, Line

pytestmark = pytest.mark.anyio


def _ahead(engine: FakeEngine) -> None:
    """Somebody else committed meanwhile."""
    for rank in engine.ranks:
        rank.version = 3


def _behind(engine: FakeEngine) -> None:
    """Somebody else took a commit back."""
    for rank in engine.ranks:
        rank.write(rank.undo.pop(2))
        rank.version = 1


def _altered(engine: FakeEngine) -> None:
    """Somebody loaded weights in another way, on one rank."""
    engine.ranks[1].weights["model.norm.weight"][0] ^= 1


@pytest.mark.parametrize("meddle", [_ahead, _behind, _altered])
async def test_an_engine_that_is_elsewhere_is_refused(
    tmp_path: Path, meddle: Callable[[FakeEngine], None]
) -> None:
    """Not ready, no change is taken, and nothing is written to it."""
    async with running(tmp_path, ranks=2) as admin:
        for seed in (1, 2):
            await admin.commit(seed=seed)
        while not await admin.service._digests.known(admin.service.link.require(), 2):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # they are recorded in the background
        engine = admin.engine
    meddle(engine)
    before = [{name: bits.tobytes() for name, bits in rank.weights.items()} for rank in engine.ranks]
    async with asleep(tmp_path, Line(engine)) as admin:
        await until(lambda: admin.service.link.unknown)
        ready = await admin.http.get("/health/ready")
        assert (ready.status_code, code(ready)) == (503, "state_unknown")
        put = await admin.http.put("/v1/experts/0/0", content=expert_body(3), headers=OCTETS)
        assert code(put) == "state_unknown"
        assert code(await admin.http.post("/v1/rollback", json={"to_version": 0})) == "state_unknown"
    assert before == [{name: bits.tobytes() for name, bits in rank.weights.items()} for rank in engine.ranks]


async def test_an_engine_at_the_current_version_is_taken_as_it_is(tmp_path: Path) -> None:
    """The digests are asked for and agree; nothing is prepared or committed, and it is ready."""
    async with running(tmp_path, ranks=2) as admin:
        await admin.commit()
        engine = admin.engine
    engine.calls.clear()
    async with running(tmp_path, engine=engine) as admin:
        assert (await admin.http.get("/health/ready")).json()["version"] == "1"
    assert "digests" in engine.calls
    assert not {"prepare", "commit"} & set(engine.calls)


async def test_the_first_commit_to_a_new_engine_follows_its_proof(tmp_path: Path) -> None:
    """An engine at its base: its digests as loaded are asked for before anything is written to it."""
    async with running(tmp_path, ranks=2) as admin:
        await admin.commit()
        admin.engine.restart()
        admin.engine.calls.clear()
        await until(lambda: "commit" in admin.engine.calls and admin.settled)
        calls = admin.engine.calls
        assert calls.index("digests") < calls.index("prepare") < calls.index("commit")
        assert (await admin.http.get("/health/ready")).json()["version"] == "1"


async def test_an_engine_with_another_secret_is_not_attached(tmp_path: Path) -> None:
    """Whoever does not know the secret is told so, and the service goes on looking."""
    secret = tmp_path / "secret"
    secret.write_text("wrong\n")
    async with asleep(
        tmp_path / "state", Line(FakeEngine(secret="right")), engine_secret_file=secret
    ) as admin:
        await until(lambda: "secret" in (admin.service.link.problem or ""))
        assert code(await admin.http.get("/health/ready")) == "engine_unavailable"
        secret.write_text("right\n")
        await until(lambda: admin.settled)
