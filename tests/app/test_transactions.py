"""Transactions over HTTP: states, uploads and their order, expiry, what is left on disk."""

from pathlib import Path

import pytest
from blake3 import blake3

from app.main import create_app
from app.settings import Settings
from schemas.dtypes import Dtype
from tests.fakes.admin import (
    OCTETS,
    Q_PROJ,
    asleep,
    bf16,
    code,
    expert_body,
    expert_parts,
    q_proj_body,
    running,
    until,
)
from tests.fakes.engine import HIDDEN, FakeEngine, Line
from tests.fakes.safetensors import body

pytestmark = pytest.mark.anyio


async def test_open_answers_with_location_and_options(tmp_path: Path) -> None:
    """Opening says where the transaction is and repeats what it was opened with."""
    async with running(tmp_path) as admin:
        answer = await admin.http.post("/v1/transactions", json={"label": "step 7", "base_version": 0})
        document = answer.json()
        assert answer.status_code == 201
        assert answer.headers["location"] == f"/v1/transactions/{document['id']}"
        assert (document["state"], document["label"], document["base_version"]) == ("open", "step 7", "0")
        assert (await admin.http.get(answer.headers["location"])).json() == document


async def test_open_takes_no_body_at_all(tmp_path: Path) -> None:
    """Every option has a default, so `curl -X POST` is enough."""
    async with running(tmp_path) as admin:
        assert (await admin.http.post("/v1/transactions")).status_code == 201


@pytest.mark.parametrize(
    "options",
    [
        {"in_flight": "later"},
        {"drain_timeout_s": 0},
        {"drain_timeout_s": 3601},
        {"expires_in_s": 0},
        {"expires_in_s": 1e9},
        {"label": "x" * 300},
        {"label": 7},
        {"base_version": -1},
        {"base_version": "1.0"},
        {"base_version": 1.5},
        {"base_version": True},
        {"unknown": 1},
        {"allow_nonfinite": "maybe"},
    ],
)
async def test_bad_options_are_422(tmp_path: Path, options: dict[str, object]) -> None:
    """Options of the wrong form open nothing."""
    async with running(tmp_path) as admin:
        assert code(await admin.http.post("/v1/transactions", json=options)) == "bad_value"
        assert not admin.service.transactions.all()


async def test_uploads_are_numbered_and_a_second_put_goes_last(tmp_path: Path) -> None:
    """Uploads keep the order of acceptance; replacing one moves it to the end and frees its file."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        first = await admin.upload(transaction, seed=1, expert=0)
        batch = await admin.http.post(f"{transaction}/patches", content=q_proj_body(), headers=OCTETS)
        again = await admin.upload(transaction, seed=9, expert=0)
        assert [one.json()["number"] for one in (first, batch, again)] == [1, 2, 3]
        view = (await admin.http.get(transaction)).json()
        assert [(one["number"], one["kind"]) for one in view["uploads"]] == [(2, "plain"), (3, "expert")]
        assert len(admin.files) == 2
        assert admin.service.staging.budget.used == view["nbytes"] == len(expert_body()) + len(q_proj_body())


async def test_uploads_apply_in_their_order(tmp_path: Path) -> None:
    """Of two writes to the same place the later one wins."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        for seed in (1, 2):
            await admin.http.post(f"{transaction}/patches", content=q_proj_body(seed), headers=OCTETS)
        assert (await admin.http.post(f"{transaction}/commit")).status_code == 200
        assert admin.engine.weights(Q_PROJ).tobytes() == bf16(2, HIDDEN * HIDDEN)


async def test_answer_carries_the_bodys_blake3(tmp_path: Path) -> None:
    """An upload's answer and the receipt name the body by its digest."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        answer = await admin.upload(transaction, seed=4)
        digest = blake3(expert_body(4)).hexdigest()
        assert answer.json()["blake3"] == digest
        receipt = (await admin.http.post(f"{transaction}/commit")).json()
        assert [one["blake3"] for one in receipt["uploads"]] == [digest]


async def test_refused_uploads_leave_nothing(tmp_path: Path) -> None:
    """A wrong body is a 4xx, is not in the transaction, and leaves neither file nor reserved bytes."""
    short = expert_parts(1)
    del short["down_proj"]
    bad = [b"", b"\x80\x81\x82\xff", body(short), q_proj_body()]
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        for content in bad:
            answer = await admin.http.put(f"{transaction}/experts/0/0", content=content, headers=OCTETS)
            assert 400 <= answer.status_code < 500, content
            assert code(answer)
        assert (await admin.http.get(transaction)).json()["uploads"] == []
        assert admin.files == []
        assert admin.service.staging.budget.used == 0


async def test_partial_experts_need_to_be_asked_for(tmp_path: Path) -> None:
    """A subset of an expert's tensors is refused unless `partial=true`."""
    parts = {"down_proj": expert_parts(1)["down_proj"]}
    async with running(tmp_path) as admin:
        path = f"{await admin.open()}/experts/1/3"
        assert code(await admin.http.put(path, content=body(parts), headers=OCTETS)) == "missing_tensor"
        answer = await admin.http.put(f"{path}?partial=true", content=body(parts), headers=OCTETS)
        assert (answer.status_code, answer.json()["tensors"]) == (200, 1)
        typo = await admin.http.put(f"{path}?partal=true", content=body(parts), headers=OCTETS)
        assert code(typo) == "bad_value"


async def test_nonfinite_needs_to_be_allowed(tmp_path: Path) -> None:
    """NaN is refused unless the transaction allows it."""
    nan = body({Q_PROJ: (Dtype.BF16, (HIDDEN, HIDDEN), b"\xc0\x7f" * HIDDEN * HIDDEN)})
    async with running(tmp_path) as admin:
        strict, loose = await admin.open(), await admin.open(allow_nonfinite=True)
        refused = await admin.http.post(f"{strict}/patches", content=nan, headers=OCTETS)
        assert code(refused) == "nonfinite"
        assert (await admin.http.post(f"{loose}/patches", content=nan, headers=OCTETS)).status_code == 200


@pytest.mark.parametrize("place", ["9/0", "0/4", "-1/0", "0/-1", "99999999999999999999/0"])
async def test_unknown_places_are_404_before_the_body(tmp_path: Path, place: str) -> None:
    """Layer and expert are ids in the path."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        for path in (f"{transaction}/experts/{place}", f"/v1/experts/{place}"):
            answer = await admin.http.put(path, content=expert_body(), headers=OCTETS)
            assert (answer.status_code, code(answer)) == (404, "unknown_expert")


@pytest.mark.parametrize("ended", ["abort", "commit"])
async def test_an_ended_transaction_takes_nothing(tmp_path: Path, ended: str) -> None:
    """After its end every change is 409, the staged file is gone and the state stays readable."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        await admin.upload(transaction)
        if ended == "abort":
            answer = await admin.http.delete(transaction)
            assert answer.json()["state"] == "aborted"
        else:
            assert (await admin.http.post(f"{transaction}/commit")).status_code == 200
        assert admin.files == []
        assert admin.service.staging.budget.used == 0
        refused = [
            await admin.upload(transaction),
            await admin.http.post(f"{transaction}/patches", content=q_proj_body(), headers=OCTETS),
            await admin.http.post(f"{transaction}/prepare"),
            await admin.http.post(f"{transaction}/commit"),
        ]
        assert [code(answer) for answer in refused] == ["transaction_state"] * 4
        assert len((await admin.http.get(transaction)).json()["uploads"]) == 1


async def test_aborting_twice_is_fine_but_a_commit_stays(tmp_path: Path) -> None:
    """DELETE can be repeated; it does not undo a commit."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        assert (await admin.http.delete(transaction)).status_code == 200
        assert (await admin.http.delete(transaction)).status_code == 200
        other = await admin.open()
        await admin.upload(other)
        await admin.http.post(f"{other}/commit")
        assert code(await admin.http.delete(other)) == "transaction_state"


@pytest.mark.parametrize("step", ["", "/prepare", "/commit"])
async def test_unknown_transactions_are_404(tmp_path: Path, step: str) -> None:
    """Ids in the path that don't exist, whatever they look like."""
    async with running(tmp_path) as admin:
        for name in ("0123", "%00", "%80%81", "current"):
            path = f"/v1/transactions/{name}{step}"
            answer = await (admin.http.post(path) if step else admin.http.get(path))
            assert (answer.status_code, code(answer)) == (404, "unknown_transaction")


@pytest.mark.parametrize("step", ["prepare", "commit"])
async def test_an_empty_transaction_is_refused(tmp_path: Path, step: str) -> None:
    """Nothing to apply is 422 and takes no version."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        assert code(await admin.http.post(f"{transaction}/{step}")) == "nothing_to_apply"
        assert await admin.version() == "0"


async def test_transactions_expire_with_their_files(tmp_path: Path) -> None:
    """After `expires_in_s` a transaction is 410, its files are gone and so is what the engine prepared."""
    async with running(tmp_path) as admin:
        transaction = await admin.open(expires_in_s=0.3)
        await admin.upload(transaction)
        await admin.http.post(f"{transaction}/prepare")
        assert admin.engine.ranks[0].prepared
        await until(lambda: not admin.files and not admin.engine.ranks[0].prepared)
        assert (await admin.http.get(transaction)).json()["state"] == "expired"
        for answer in (await admin.http.post(f"{transaction}/commit"), await admin.upload(transaction)):
            assert (answer.status_code, code(answer)) == (410, "transaction_expired")


async def test_prepare_is_kept_until_an_upload_voids_it(tmp_path: Path) -> None:
    """Prepared work is used by the commit; a further upload drops it on the engine."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        await admin.upload(transaction)
        prepared = await admin.http.post(f"{transaction}/prepare")
        assert (prepared.status_code, prepared.json()["version"]) == (200, "0")
        assert prepared.json()["undo_nbytes"] > 0
        await admin.upload(transaction, expert=1)
        assert (await admin.http.get(transaction)).json()["state"] == "open"
        assert not admin.engine.ranks[0].prepared
        await admin.http.post(f"{transaction}/prepare")
        await admin.http.post(f"{transaction}/commit")
        assert admin.engine.calls.count("prepare") == 2
        assert admin.engine.calls.count("commit") == 1


async def test_budgets_for_staged_bytes(tmp_path: Path) -> None:
    """Uploads over the budget are 507; aborting makes room."""
    async with running(tmp_path, staged_bytes=len(expert_body()) + 100) as admin:
        first, second = await admin.open(), await admin.open()
        await admin.upload(first)
        refused = await admin.upload(second)
        assert (refused.status_code, code(refused)) == (507, "staged_budget")
        await admin.http.delete(first)
        assert (await admin.upload(second)).status_code == 200


async def test_leftovers_are_removed_at_the_start_and_not_before(tmp_path: Path) -> None:
    """Making the app touches nothing; starting it empties what an earlier run left."""
    left = tmp_path / "staged" / "old"
    left.parent.mkdir()
    left.write_bytes(b"x")
    create_app(Settings(state_dir=tmp_path / "never"))
    create_app(Settings(state_dir=tmp_path))
    assert left.exists()
    assert not (tmp_path / "never").exists()
    async with running(tmp_path):
        assert not left.exists()


async def test_model_routes_wait_for_the_engine(tmp_path: Path) -> None:
    """Until the engine has described itself, what needs the model is 503 and the rest answers."""
    line = Line(FakeEngine())
    line.cuts["*"] = "refused"
    async with asleep(tmp_path, line) as admin:
        transaction = await admin.open()
        for answer in (
            await admin.http.get("/v1/model"),
            await admin.http.get("/v1/model/tensors"),
            await admin.http.get("/v1/experts/0/0"),
            await admin.upload(transaction),
            await admin.http.put("/v1/experts/0/0", content=expert_body(), headers=OCTETS),
            await admin.http.post("/v1/rollback", json={"to_version": 0}),
        ):
            assert (answer.status_code, code(answer)) == (503, "engine_unavailable")
        assert (await admin.http.get("/v1/status")).json()["writable"] is False
        admin.line.cuts.clear()
        await until(lambda: admin.service.link.engine)
        assert (await admin.http.get("/v1/model")).status_code == 200
