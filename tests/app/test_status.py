"""Health, status, metrics, the model, read-back and digests."""

import asyncio
from pathlib import Path

import pytest

from schemas.dtypes import Dtype
from schemas.status import Progress
from tests.fakes.admin import Q_PROJ, asleep, code, expert_parts, running, until
from tests.fakes.engine import FakeEngine, Line
from tests.fakes.safetensors import parse

pytestmark = pytest.mark.anyio


async def test_live_answers_while_the_engine_hangs(tmp_path: Path) -> None:
    """An engine that takes questions and never answers makes the service unready, not dead."""
    engine = FakeEngine()
    engine.faults.silent = asyncio.Event()
    async with asleep(tmp_path, Line(engine)) as admin:
        assert (await admin.http.get("/health/live")).json() == {"status": "alive"}
        ready = await admin.http.get("/health/ready")
        assert (ready.status_code, code(ready)) == (503, "engine_unavailable")
        engine.faults.silent.set()


async def test_ready_asks_the_engine_each_time(tmp_path: Path) -> None:
    """It is ready only while the engine answers in time and runs the current version."""
    async with running(tmp_path, engine_poll_s=60) as admin:
        assert (await admin.http.get("/health/ready")).json() == {"status": "ready", "version": "0"}
        silence = admin.engine.faults.silent = asyncio.Event()
        assert code(await admin.http.get("/health/ready")) == "engine_unavailable"
        silence.set()
        assert (await admin.http.get("/health/ready")).status_code == 200
        admin.line.cuts["state"] = "refused"
        assert code(await admin.http.get("/health/ready")) == "engine_unavailable"
        admin.line.cuts.clear()
        admin.engine.ranks[0].version = 3
        assert code(await admin.http.get("/health/ready")) == "recovering"
        admin.engine.ranks[0].version = 0
        admin.engine.paused = True
        assert code(await admin.http.get("/health/ready")) == "engine_unavailable"


async def test_the_secret_is_sent_and_read_again(tmp_path: Path) -> None:
    """The bridge is asked with the secret of the file, which may appear later than the admin."""
    engine = FakeEngine(secret="between-us")
    secret = tmp_path / "secret"
    async with asleep(tmp_path / "state", Line(engine), engine_secret_file=secret) as admin:
        assert (await admin.http.get("/v1/status")).json()["engine"]["reachable"] is False
        await asyncio.sleep(0.05)
        assert admin.service.link.engine is None
        secret.write_text("between-us\n")
        await until(lambda: admin.settled)
        assert (await admin.http.get("/health/ready")).status_code == 200


async def test_status_tells_what_there_is(tmp_path: Path) -> None:
    """Engine, ranks, budgets, open transactions, and how a start is going."""
    async with running(tmp_path, ranks=2) as admin:
        await admin.commit()
        transaction = await admin.open()
        upload = (await admin.upload(transaction)).json()
        await admin.http.post(f"{transaction}/prepare")
        await admin.service.link.look()
        admin.service.progress = lambda: Progress(phase="loading", detail="weights")
        status = (await admin.http.get("/v1/status")).json()
        assert (status["version"], status["writable"], status["busy"]) == ("1", True, False)
        assert status["open_transactions"] == [transaction.rpartition("/")[2]]
        assert status["storage"]["staged"]["used"] == upload["nbytes"]
        assert status["storage"]["undo"]["used"] == 328
        engine = status["engine"]
        assert (engine["reachable"], engine["paused"], engine["vllm_version"]) == (True, False, "0.32.0")
        assert engine["parallel"]["tensor"] == 2
        assert [(one["boot"], one["version"], one["prepared"]) for one in engine["ranks"]] == [
            ("boot-1-0", "1", 1),
            ("boot-1-1", "1", 1),
        ]
        assert engine["progress"]["phase"] == "loading"


async def test_metrics_count_by_outcome(tmp_path: Path) -> None:
    """Commits and rollbacks by their code, uploads, and gauges of now; two apps don't share them."""
    async with running(tmp_path / "a") as admin, running(tmp_path / "b") as other:
        await admin.commit()
        admin.engine.faults.commit[0] = "before"
        await admin.commit()
        await admin.http.post("/v1/rollback", json={"to_version": 9})
        answer = await admin.http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        for line in (
            'graft_changes_total{code="done",kind="commit"} 1.0',
            'graft_changes_total{code="commit_undone",kind="commit"} 1.0',
            'graft_changes_total{code="version_not_held",kind="rollback"} 1.0',
            'graft_uploads_total{kind="expert"} 2.0',
            "graft_stall_seconds_count 1.0",
            "graft_version 1.0",
            "graft_engine_up 1.0",
        ):
            assert line in answer.text.splitlines(), line
        assert "graft_version 0.0" in (await other.http.get("/metrics")).text


async def test_model_names_an_experts_tensors(tmp_path: Path) -> None:
    """What to put into an upload, with shapes and aliases."""
    async with running(tmp_path) as admin:
        model = (await admin.http.get("/v1/model")).json()
        assert (model["layers"], model["experts"], model["expert_layers"]) == (2, 4, [0, 1])
        shapes = {one["name"]: tuple(one["shape"]) for one in model["expert_tensors"]}
        assert shapes == {name: shape for name, (_, shape, _) in expert_parts(0).items()}
        assert any("w13_weight" in one["aliases"] for one in model["expert_tensors"])


async def test_model_tensors_come_in_pages(tmp_path: Path) -> None:
    """Following `next` gives every tensor once, in order; a prefix narrows it."""
    async with running(tmp_path) as admin:
        names: list[str] = []
        after: str | None = ""
        while after is not None:
            page = (await admin.http.get("/v1/model/tensors", params={"after": after, "limit": 3})).json()
            assert len(page["tensors"]) <= 3
            names += [one["name"] for one in page["tensors"]]
            after = page["next"]
        assert names == sorted(names)
        assert len(names) == 14
        layer = (await admin.http.get("/v1/model/tensors", params={"prefix": "model.layers.1."})).json()
        assert [one["name"] for one in layer["tensors"]] == [
            n for n in names if n.startswith("model.layers.1.")
        ]
        odd = (await admin.http.get("/v1/model/tensors", params={"prefix": "model.odd"})).json()["tensors"]
        assert [(one["treatment"], one["reason"]) for one in odd] == [("unsupported", "a fake reason")]


async def test_read_back_is_a_file_of_one_version(tmp_path: Path) -> None:
    """Experts under short names, tensors under full ones, the version as ETag, nothing left on disk."""
    async with running(tmp_path) as admin:
        await admin.commit(seed=6)
        expert = await admin.http.get("/v1/experts/0/0")
        assert (expert.headers["etag"], expert.headers["content-type"]) == (
            '"1"',
            "application/vnd.safetensors",
        )
        assert int(expert.headers["content-length"]) == len(expert.content)
        assert parse(expert.content) == expert_parts(6)
        tensor = await admin.http.get(f"/v1/tensors/{Q_PROJ}")
        assert parse(tensor.content) == {Q_PROJ: (Dtype.BF16, (8, 8), admin.engine.weights(Q_PROJ).tobytes())}
        slashed = await admin.http.get("/v1/tensors/a/b.c")
        assert (slashed.status_code, code(slashed)) == (404, "unknown_tensor")
        missing = await admin.http.get("/v1/experts/0/4")
        assert (missing.status_code, code(missing)) == (404, "unknown_expert")
        admin.line.cuts["read"] = "after"
        assert code(await admin.http.get("/v1/experts/0/0")) == "engine_unavailable"
        assert admin.files == []


async def test_digests_are_per_rank_and_by_prefix(tmp_path: Path) -> None:
    """A change moves the digests of what it touched and no other; going back restores them."""
    async with running(tmp_path, ranks=2) as admin:

        async def digests() -> dict[str, str]:
            ranks = (await admin.http.get("/v1/digests?prefix=model.layers.0.")).json()["ranks"]
            assert [one["rank"] for one in ranks] == [0, 1]
            return {one["name"]: one["blake3"] for one in ranks[0]["tensors"]}

        before = await digests()
        await admin.commit()
        after = await digests()
        assert {name for name in before if before[name] != after[name]} == {
            name for name in before if ".experts." in name
        }
        await admin.http.post("/v1/rollback", json={"to_version": 0})
        assert await digests() == before


async def test_status_is_not_behind_a_change(tmp_path: Path) -> None:
    """Right after a commit or rollback every rank is shown at the version that was answered."""
    async with running(tmp_path, ranks=2, engine_poll_s=60) as admin:
        await admin.commit()
        for version in (1, 2):
            status = (await admin.http.get("/v1/status")).json()
            assert status["version"] == str(version)
            assert [rank["version"] for rank in status["engine"]["ranks"]] == [str(version)] * 2
            await admin.http.post("/v1/rollback", json={"to_version": 0})
