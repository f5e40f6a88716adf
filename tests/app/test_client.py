"""The Python client, waiting and async, against the admin behind a real socket."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from app.client import (
    AnswerLost,
    AsyncClient,
    BadAnswer,
    Body,
    Client,
    Conflict,
    NotDone,
    Refused,
    Retry,
    StateUnknown,
    Tensor,
    Unreachable,
)
from app.remote import calls
from app.remote.call import Call
from schemas.bridge import RankError
from schemas.dtypes import Dtype
from schemas.operations import Operation, OperationKind, OperationState
from schemas.problems import Code
from schemas.transactions import State
from tests.app.cutting import Cut, cutting
from tests.app.sockets import served
from tests.fakes.admin import Q_PROJ, Admin, bf16, expert_parts, running, until
from tests.fakes.engine import HIDDEN, FakeEngine
from tests.fakes.safetensors import parse

pytestmark = pytest.mark.anyio

QUICK = Retry(times=5, pause_s=0.01)
KINDS = ("waiting", "awaiting")


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def expert(seed: int) -> dict[str, Tensor]:
    """One expert as a trainer without torch has it: raw bits of bf16."""
    parts = expert_parts(seed)
    return {n: Tensor(dtype, shape, np.frombuffer(bits, "<u2")) for n, (dtype, shape, bits) in parts.items()}


def q_proj(seed: int) -> dict[str, Tensor]:
    return {Q_PROJ: Tensor(Dtype.BF16, (HIDDEN, HIDDEN), np.frombuffer(bf16(seed, HIDDEN * HIDDEN), "<u2"))}


async def sent(kind: str, port: int, call: Call[Any], retry: Retry = QUICK) -> Any:
    """The result of a call by one kind of client."""
    if kind == "awaiting":
        async with AsyncClient(url(port), retry=retry) as client:
            return await client.send(call)
    return await asyncio.to_thread(_sent, port, call, retry)


def _sent(port: int, call: Call[Any], retry: Retry) -> Any:
    with Client(url(port), retry=retry) as client:
        return client.send(call)


async def waiting(port: int, work: Callable[[Client], Any], retry: Retry = QUICK) -> Any:
    """Do `work` in a thread with a client that waits."""

    def run() -> Any:
        with Client(url(port), retry=retry) as client:
            return work(client)

    return await asyncio.to_thread(run)


def engine_has(admin: Admin, seed: int) -> bool:
    """Whether the engine runs expert 2 of layer 1 as it was sent."""
    wanted = expert_parts(seed)["down_proj"][2]
    whole = admin.engine.weights("model.layers.1.mlp.experts.down_proj").tobytes()
    return whole[2 * len(wanted) : 3 * len(wanted)] == wanted


async def test_a_transaction_commits_at_the_end(tmp_path: Path) -> None:
    """What was put and patched in `with` is one version afterwards, with the receipt at hand."""
    async with running(tmp_path) as admin, served(admin) as port:

        def work(client: Client) -> None:
            with client.transaction(label="both", base_version=0) as change:
                change.put_expert(1, 2, expert(5))
                assert change.patch(q_proj(6)).number == 2
                assert change.prepare().version == 0
            assert (change.receipt.version, change.receipt.label, change.ended) == (1, "both", True)
            assert [one.kind for one in change.receipt.uploads] == ["expert", "plain"]
            assert client.current().version == 1

        await waiting(port, work)
        assert engine_has(admin, 5)
        assert admin.engine.weights(Q_PROJ).tobytes() == bf16(6, HIDDEN * HIDDEN)


async def test_an_async_transaction_commits_at_the_end(tmp_path: Path) -> None:
    """The same with `async with`, reading back what was written."""
    async with running(tmp_path) as admin, served(admin) as port, AsyncClient(url(port)) as client:
        async with client.transaction() as change:
            await change.put_expert(1, 2, expert(5))
        assert change.receipt.version == 1
        back = await client.read_expert(1, 2)
        assert (back.version, parse(back.content)) == (1, expert_parts(5))


@pytest.mark.parametrize("trouble", [RuntimeError, KeyboardInterrupt])
async def test_an_exception_aborts(tmp_path: Path, trouble: type[BaseException]) -> None:
    """The exception goes on as it was; nothing is committed, nothing stays staged."""
    async with running(tmp_path) as admin, served(admin) as port:

        def work(client: Client) -> str:
            change = client.transaction()
            with pytest.raises(trouble) as raised, change:
                change.put_expert(1, 2, expert(5))
                raise trouble
            assert not hasattr(raised.value, "__notes__")
            assert client.send(calls.transaction_state(change.id)).state is State.ABORTED
            return client.current().version

        assert await waiting(port, work) == 0
        assert admin.files == []
        with pytest.raises(ZeroDivisionError):
            async with AsyncClient(url(port)) as client, client.transaction() as other:
                await other.put_expert(1, 2, expert(5))
                raise ZeroDivisionError
        assert admin.service.transactions.get(other.id).state is State.ABORTED


async def test_cancelling_aborts(tmp_path: Path) -> None:
    """A cancelled task leaves no transaction behind."""
    async with running(tmp_path) as admin, served(admin) as port, AsyncClient(url(port)) as client:
        change = client.transaction()

        async def work() -> None:
            async with change:
                await change.put_expert(1, 2, expert(5))
                await asyncio.sleep(3600)

        task = asyncio.create_task(work())
        await until(lambda: admin.files)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert admin.service.transactions.get(change.id).state is State.ABORTED


async def test_a_refused_commit_aborts_but_within_it_can_be_tried_again(tmp_path: Path) -> None:
    """At the end of `with` a refusal is raised and nothing stays; an own commit can be repeated."""
    async with running(tmp_path) as admin, served(admin) as port:

        def work(client: Client) -> None:
            with pytest.raises(Refused) as raised, client.transaction():
                pass
            assert raised.value.code == Code.NOTHING_TO_APPLY
            assert client.status().open_transactions == ()
            with client.transaction() as change:
                change.patch(q_proj(6))
                with pytest.raises(Conflict):
                    change.commit(if_match=7)
                change.commit(if_match=0)
            with client.transaction() as dropped:
                dropped.patch(q_proj(7))
                dropped.abort()
            assert client.current().version == 1

        await waiting(port, work)


async def test_a_dead_service_does_not_hide_the_reason(tmp_path: Path) -> None:
    """If aborting fails too, the exception says so in a note and is still the first one."""
    async with running(tmp_path) as admin, served(admin) as port, cutting(port) as proxy:

        def work(client: Client) -> None:
            with pytest.raises(RuntimeError) as raised, client.transaction():
                proxy.plan.extend([Cut.BEFORE] * 9)
                client.close()  # its connection was not cut
                client.__init__(url(proxy.port), retry=QUICK)  # type: ignore[misc]
                raise RuntimeError
            assert "could not be aborted, it ends when it expires" in raised.value.__notes__[0]

        await waiting(proxy.port, work)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.WITHIN, Cut.ANSWER, Cut.WITHIN_ANSWER])
async def test_a_broken_connection_repeats_and_doubles_nothing(tmp_path: Path, kind: str, cut: Cut) -> None:
    """Wherever it breaks, twice in a row: the caller gets the receipt of the only version."""
    async with running(tmp_path) as admin, served(admin) as port, cutting(port, cut, cut) as proxy:
        receipt = await sent(kind, proxy.port, calls.put_expert(1, 2, expert(5)))
        assert receipt.version == 1
        assert proxy.connections >= 3
        assert await admin.version() == "1"
        assert admin.engine.calls.count("commit") == 1
        assert engine_has(admin, 5)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_change_that_still_runs_is_waited_for(tmp_path: Path, kind: str) -> None:
    """After a break the first request still runs: the client waits for its answer, beyond its repetitions."""
    async with running(tmp_path) as admin, served(admin) as port, cutting(port, Cut.WITHIN_ANSWER) as proxy:
        hold = admin.engine.faults.hold = asyncio.Event()
        call = calls.put_expert(1, 2, expert(5))
        first = asyncio.create_task(sent("awaiting", port, call))
        await until(lambda: "commit" in admin.engine.calls)
        again = asyncio.create_task(sent(kind, proxy.port, call, Retry(times=1, pause_s=0.01)))
        await until(lambda: proxy.connections >= 2)
        hold.set()
        assert (await again) == (await first)
        assert admin.engine.calls.count("commit") == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_that_never_comes_is_said_to_be_lost(tmp_path: Path, kind: str) -> None:
    """A change whose outcome is not known is no ordinary failure; its key then gives the first answer."""
    plan = [Cut.ANSWER] * 3
    async with running(tmp_path) as admin, served(admin) as port, cutting(port, *plan) as proxy:
        call = calls.put_expert(1, 2, expert(5))
        with pytest.raises(AnswerLost) as raised:
            await sent(kind, proxy.port, call, Retry(times=2, pause_s=0.01))
        assert raised.value.key == call.key
        known = calls.with_key(calls.put_expert(1, 2, expert(5)), raised.value.key)
        assert (await sent(kind, port, known)).version == 1
        assert await admin.version() == "1"


@pytest.mark.parametrize("kind", KINDS)
async def test_nobody_there_is_unreachable(kind: str, tmp_path: Path) -> None:
    """Where nothing was sent nothing can have been done, so it is not lost; a reader's answer never is."""
    with pytest.raises(Unreachable):
        await sent(kind, 9, calls.rollback(0), Retry(times=1, pause_s=0.01))
    plan = [Cut.ANSWER] * 2
    async with running(tmp_path) as admin, served(admin) as port, cutting(port, *plan) as proxy:
        with pytest.raises(Unreachable):
            await sent(kind, proxy.port, calls.status(), Retry(times=1, pause_s=0.01))


async def test_an_answer_is_no_loss() -> None:
    """A service that said 503 to all of a request and then was gone has done nothing."""
    answers = [httpx.Response(503, json={"code": "recovering", "detail": ""}, headers={"retry-after": "0"})]

    def answer(request: httpx.Request) -> httpx.Response:
        request.read()
        if not answers:
            raise httpx.ConnectError("gone", request=request)
        return answers.pop()

    with pytest.raises(Unreachable):
        Client(transport=httpx.MockTransport(answer), retry=Retry(times=2, pause_s=0)).rollback(0)


@pytest.mark.parametrize("kind", KINDS)
async def test_503_with_retry_after_is_tried_again_and_without_is_not(kind: str) -> None:
    """As often as allowed, under one key; a 503 that does not invite to come again is raised at once."""
    keys: list[str] = []
    invites = {"retry-after": "0"}

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["idempotency-key"])
        document = {"code": "recovering", "detail": "soon", "status": 503}
        return httpx.Response(503, json=document, headers=invites)

    async def send() -> None:
        transport = httpx.MockTransport(answer)
        if kind == "awaiting":
            await AsyncClient(transport=transport, retry=Retry(times=3)).send(calls.rollback(0))
        else:
            Client(transport=transport, retry=Retry(times=3)).send(calls.rollback(0))

    with pytest.raises(NotDone, match="soon"):
        await send()
    assert (len(keys), len(set(keys))) == (4, 1)
    invites.clear()
    with pytest.raises(NotDone):
        await send()
    assert len(keys) == 5


async def test_kinds_of_refusals(tmp_path: Path) -> None:
    """Each kind of trouble has its class, with the stable code and the whole document."""
    async with running(tmp_path) as admin, served(admin) as port:

        async def refused(call: Call[Any]) -> Refused:
            with pytest.raises(Refused) as raised:
                await sent("waiting", port, call)
            return raised.value

        unknown = await refused(calls.patch({"model.nrm.weight": np.zeros(8, np.float32)}))
        assert (type(unknown), unknown.code, unknown.status) == (Refused, "unknown_tensor", 422)
        assert "model.norm.weight" in unknown.problem["errors"][0]["nearest"]
        moved = await refused(calls.patch(q_proj(1), base_version=5))
        assert (type(moved), moved.code) == (Conflict, "version_moved")
        admin.engine.faults.prepare[0] = RankError(code=Code.INTERNAL, detail="a fault")
        assert type(await refused(calls.patch(q_proj(1)))) is NotDone
        admin.engine.faults.prepare.clear()
        admin.engine.faults.commit[0] = "middle"
        assert (await refused(calls.patch(q_proj(1)))).code == "commit_undone"
        admin.engine.faults.undo.add(0)
        assert type(await refused(calls.patch(q_proj(1)))) is StateUnknown


async def test_somebody_else_is_no_graft() -> None:
    """A page of another server is not taken for an answer, whatever its status."""
    for status in (200, 404, 502):
        transport = httpx.MockTransport(lambda request, s=status: httpx.Response(s, text="<html>"))
        with pytest.raises(BadAnswer):
            Client(transport=transport, retry=QUICK).status()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", [200, 404, 502])
async def test_a_change_that_somebody_else_answers_may_be_made(kind: str, status: int) -> None:
    """A page instead of a receipt, or a proxy without a service, tells nothing; a 404 is nobody's work."""
    keys: set[str] = set()

    def answer(request: httpx.Request) -> httpx.Response:
        keys.add(request.headers["idempotency-key"])
        return httpx.Response(status, text="<html>")

    call = calls.patch(q_proj(6))
    with pytest.raises(BadAnswer if status == 404 else AnswerLost) as raised:
        await asked(kind, answer, call)
    assert getattr(raised.value, "key", call.key) == call.key
    assert keys == {call.key}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_proxy_that_finds_the_service_again_is_no_trouble(kind: str) -> None:
    """After a 502 the request is sent again under its key, and what is answered then counts."""
    answers = [httpx.Response(502, text="<html>"), httpx.Response(409, json={"code": "version_moved"})]
    with pytest.raises(Conflict):
        await asked(kind, lambda request: answers.pop(0), calls.rollback(0))
    assert answers == []


async def asked(kind: str, answer: Callable[[httpx.Request], httpx.Response], call: Call[Any]) -> Any:
    """The result of a call that `answer` answers."""
    transport = httpx.MockTransport(answer)
    if kind == "awaiting":
        return await AsyncClient(transport=transport, retry=QUICK).send(call)
    return Client(transport=transport, retry=QUICK).send(call)


@pytest.mark.big
async def test_a_refusal_before_the_body_is_read_reaches_the_sender(tmp_path: Path) -> None:
    """A token that is missing is said at once, not after a gigabyte; the token itself is sent."""
    big = Body(1 << 30, lambda: iter(bytes(1 << 20) for _ in range(1 << 10)))
    async with running(tmp_path, token="secret") as admin, served(admin) as port:
        with pytest.raises(Refused) as raised:
            await sent("waiting", port, calls.patch(big))
        assert raised.value.code == "unauthorized"
        # asyncio drops what has arrived when sending fails; but what was not sent whole is not lost.
        with pytest.raises((Refused, Unreachable)):
            await sent("awaiting", port, calls.patch(big), Retry(times=0))
        async with AsyncClient(url(port), token="secret") as client:
            assert (await client.status()).version == 0


async def test_uploads_are_streamed(tmp_path: Path) -> None:
    """The first bytes leave before the last ones are made, and somebody can watch them go."""
    async with running(tmp_path) as admin, served(admin) as port:
        content = b"".join(Body.of_tensors(q_proj(6)).chunks())
        seen: list[int] = []

        def chunks() -> Any:
            yield content[:100]
            deadline = time.monotonic() + 5
            while not admin.files and time.monotonic() < deadline:
                time.sleep(0.005)
            assert admin.files, "nothing has arrived"
            yield content[100:]

        body = Body(len(content), chunks).watched(lambda done, total: seen.append(done))
        assert (await sent("awaiting", port, calls.patch(body))).version == 1
        assert (await sent("waiting", port, calls.patch(body))).version == 2
        assert seen == [0, 100, len(content)] * 2


async def test_a_file_that_shrinks_is_not_sent_on(tmp_path: Path) -> None:
    """A file which is not what it was when the request was described is an error of the sender."""
    file = tmp_path / "weights.safetensors"
    file.write_bytes(bytes(100))
    call = calls.patch(file)
    file.write_bytes(bytes(50))
    async with running(tmp_path / "state") as admin, served(admin) as port:
        for kind in KINDS:
            with pytest.raises(OSError, match="became shorter"):
                await sent(kind, port, call)


@pytest.mark.parametrize("cut", [Cut.NOT, Cut.WITHIN_ANSWER])
async def test_downloads_appear_when_they_are_complete(tmp_path: Path, cut: Cut) -> None:
    """Weights go to a file; a broken connection starts anew, and a failure leaves no file."""
    async with running(tmp_path / "state") as admin, served(admin) as port, cutting(port, cut) as proxy:
        file = tmp_path / "expert.safetensors"
        version = await waiting(proxy.port, lambda client: client.download(calls.read_expert(1, 2), file))
        assert version == 0
        content = file.read_bytes()
        proxy.plan.append(cut)
        async with AsyncClient(url(proxy.port), retry=QUICK) as client:
            await client.download(calls.read_expert(1, 2), file)
            assert file.read_bytes() == content == (await client.read_expert(1, 2)).content
            with pytest.raises(Refused):
                await client.download(calls.read_expert(1, 200), tmp_path / "none")
        assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [file.name]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_download_of_nobody_knows_what_replaces_nothing(tmp_path: Path, kind: str) -> None:
    """An answer that does not say its version is refused, and the file that was there is as it was."""
    file = tmp_path / "expert.safetensors"
    file.write_bytes(b"before")
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=b"other"))
    with pytest.raises(BadAnswer, match="ETag"):
        if kind == "awaiting":
            await AsyncClient(transport=transport).download(calls.read_expert(1, 2), file)
        else:
            Client(transport=transport).download(calls.read_expert(1, 2), file)
    assert file.read_bytes() == b"before"


@pytest.mark.parametrize("kind", KINDS)
async def test_operations_are_followed(tmp_path: Path, kind: str) -> None:
    """A change in the background ends with its receipt, or is raised as what it failed with."""
    async with running(tmp_path, engine=FakeEngine()) as admin, served(admin) as port:
        await admin.commit()
        for fault in (None, "middle"):
            admin.engine.faults.commit = {0: fault} if fault else {}
            begun = await sent(kind, port, calls.in_background(calls.rollback(0)))
            assert begun.state is OperationState.RUNNING
            follow = _followed(kind, port, begun)
            if fault is None:
                assert (await follow).receipt.restores == 0
            else:
                with pytest.raises(NotDone, match="commit_undone"):
                    await follow


@pytest.mark.parametrize("kind", KINDS)
async def test_an_operation_that_is_lost_from_sight_may_be_done(kind: str) -> None:
    """If the service goes away, a change that was begun has no ordinary failure; its id tells more later."""
    begun = Operation(
        id="7", kind=OperationKind.COMMIT, state=OperationState.RUNNING, created_at=datetime.now(UTC)
    )
    with pytest.raises(AnswerLost) as raised:
        await _followed(kind, 9, begun)
    assert raised.value.key == "7"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("troubles", [2, 9])
async def test_an_operation_is_followed_past_a_proxy_without_a_service(kind: str, troubles: int) -> None:
    """A 502 is asked again, as after a lost connection; if there are too many, the operation may be done."""
    begun = Operation(
        id="7", kind=OperationKind.COMMIT, state=OperationState.RUNNING, created_at=datetime.now(UTC)
    )
    done = begun.model_copy(update={"state": OperationState.DONE})
    answers = [httpx.Response(502, text="<html>")] * troubles
    answers.append(httpx.Response(200, content=done.model_dump_json()))
    transport = httpx.MockTransport(lambda request: answers.pop(0))

    async def follow() -> Operation:
        if kind == "awaiting":
            return await AsyncClient(transport=transport, retry=QUICK).wait(begun)
        return Client(transport=transport, retry=QUICK).wait(begun)

    if troubles < QUICK.times:
        assert await follow() == done
    else:
        with pytest.raises(AnswerLost) as raised:
            await follow()
        assert raised.value.key == "7"


async def _followed(kind: str, port: int, begun: Any) -> Any:
    if kind == "waiting":
        return await waiting(port, lambda client: client.wait(begun))
    async with AsyncClient(url(port), retry=QUICK) as client:
        return await client.wait(begun)


async def test_every_other_method(tmp_path: Path) -> None:
    """The rest of the routes, each once, with answers of their types."""
    async with running(tmp_path) as admin, served(admin) as port:

        def work(client: Client) -> None:
            client.patch(q_proj(3), label="first", in_flight="wait", drain_timeout_s=5)
            assert client.put_baseline("one").version == 1
            assert [one.name for one in client.baselines().baselines] == ["one"]
            assert client.rollback("0", in_flight="abort").restores == 0
            assert client.rollback(to_baseline="one", if_match=2).version == 3
            assert client.delete_baseline("one") is None
            assert client.version(1).label == "first"
            assert client.versions().current == 3
            assert client.model().experts == 4
            assert [one.name for one in client.tensors(prefix="model.norm").tensors] == ["model.norm.weight"]
            assert client.digests().ranks
            assert len(client.transactions().transactions) == 1
            assert parse(client.read_tensor(Q_PROJ).content)[Q_PROJ][2] == bf16(3, HIDDEN * HIDDEN)
            with pytest.raises(Refused, match=r"not_found|path_not_allowed|bad_checkpoint|not_supported"):
                client.reload("/nowhere")

        await waiting(port, work)
