"""Random histories against a small model: states, versions, weights and files always agree."""

import random
from itertools import product
from pathlib import Path

import pytest

from app.transactions import IDLE, LIVE, Transaction
from schemas.problems import ProblemError
from schemas.transactions import State, TransactionOptions
from tests.fakes.admin import Admin, code, running

STEPS = 150
ENDS = {State.COMMITTED, State.ABORTED, State.FAILED, State.EXPIRED, State.INTERRUPTED}
WAYS = {
    ("open", "preparing"),
    ("open", "aborted"),
    ("open", "expired"),
    ("preparing", "prepared"),
    ("preparing", "open"),
    ("prepared", "preparing"),
    ("prepared", "open"),
    ("prepared", "committing"),
    ("prepared", "aborted"),
    ("prepared", "expired"),
    ("committing", "committed"),
    ("committing", "failed"),
    ("committing", "prepared"),
}


@pytest.mark.parametrize(("old", "new"), list(product(State, State)))
def test_only_these_moves_exist(old: State, new: State) -> None:
    """Every pair of states: a way is either known or refused, and ends stay ends."""
    transaction = Transaction(TransactionOptions(), 60)
    transaction.state = old
    if (old, new) in WAYS:
        transaction.move(new)
        assert transaction.state is new
    else:
        with pytest.raises(ProblemError, match="transaction_state"):
            transaction.move(new)
        assert transaction.state is old


def test_live_and_idle_are_what_they_say() -> None:
    """Live states are those that are no ends; idle ones are those in which nothing runs."""
    assert set(State) - LIVE == ENDS
    assert {State.OPEN, State.PREPARED} == IDLE


class Model:
    """What should be true, kept beside the admin."""

    def __init__(self, admin: Admin, seed: int) -> None:
        self.admin = admin
        self.random = random.Random(seed)
        self.states: dict[str, str] = {}
        self.uploads: dict[str, set[int]] = {}
        self.weights = [self.bits()]

    def bits(self) -> bytes:
        """All weights of rank 0."""
        weights = self.admin.engine.ranks[0].weights
        return b"".join(weights[name].tobytes() for name in sorted(weights))

    async def step(self) -> None:
        """One random request; the model says what must come of it."""
        kinds = [
            self.open,
            self.upload,
            self.upload,
            self.prepare,
            self.commit,
            self.abort,
            self.roll,
            self.fail,
        ]
        await self.random.choice(kinds)()
        await self.agree()

    async def open(self) -> None:
        """A new transaction."""
        path = await self.admin.open()
        self.states[path], self.uploads[path] = "open", set()

    def some(self) -> str | None:
        """Any transaction, ended or not."""
        return self.random.choice(list(self.states)) if self.states else None

    async def upload(self) -> None:
        """An expert of random weights."""
        if (path := self.some()) is None:
            return
        expert = self.random.randrange(3)
        answer = await self.admin.upload(path, self.random.randrange(10**6), expert=expert)
        if self.states[path] in ("open", "prepared"):
            assert answer.status_code == 200
            self.states[path] = "open"
            self.uploads[path].add(expert)
        else:
            assert code(answer) == "transaction_state"

    async def prepare(self) -> None:
        """Phase one alone."""
        if (path := self.some()) is None:
            return
        answer = await self.admin.http.post(f"{path}/prepare")
        if self.refused(path):
            assert code(answer) == self.refused(path)
        else:
            assert (answer.status_code, answer.json()["version"]) == (200, str(len(self.weights) - 1))
            self.states[path] = "prepared"

    async def commit(self) -> None:
        """All of it."""
        if (path := self.some()) is None:
            return
        answer = await self.admin.http.post(f"{path}/commit")
        if self.refused(path):
            assert code(answer) == self.refused(path)
        else:
            assert (answer.status_code, answer.json()["version"]) == (200, str(len(self.weights)))
            assert answer.json()["experts"] == len(self.uploads[path])
            self.states[path] = "committed"
            self.weights.append(self.bits())

    async def abort(self) -> None:
        """Drop it."""
        if (path := self.some()) is None:
            return
        answer = await self.admin.http.delete(path)
        if self.states[path] in ("committed", "failed"):
            assert code(answer) == "transaction_state"
        else:
            assert answer.status_code == 200
            self.states[path] = "aborted"

    async def roll(self) -> None:
        """Back to any version there has been."""
        target = self.random.randrange(len(self.weights))
        answer = await self.admin.http.post("/v1/rollback", json={"to_version": target})
        assert (answer.status_code, answer.json()["version"]) == (200, str(len(self.weights)))
        self.weights.append(self.weights[target])

    async def fail(self) -> None:
        """A commit during which a rank fails."""
        if (path := self.some()) is None:
            return
        self.admin.engine.faults.commit[0] = self.random.choice(["before", "middle", "after"])
        answer = await self.admin.http.post(f"{path}/commit")
        self.admin.engine.faults.commit.clear()
        if self.refused(path):
            assert code(answer) == self.refused(path)
        else:
            assert code(answer) == "commit_undone"
            self.states[path] = "failed"

    def refused(self, path: str) -> str | None:
        """Why a prepare or commit can't be, if so."""
        if self.states[path] not in ("open", "prepared"):
            return "transaction_state"
        return None if self.uploads[path] else "nothing_to_apply"

    async def agree(self) -> None:
        """Service, engine and disk say what the model says."""
        transactions = (await self.admin.http.get("/v1/transactions")).json()["transactions"]
        assert {f"/v1/transactions/{one['id']}": one["state"] for one in transactions} == self.states
        live = [path for path, state in self.states.items() if state in ("open", "prepared")]
        assert len(self.admin.files) == sum(len(self.uploads[path]) for path in live)
        assert (
            await self.admin.version()
            == str(self.admin.engine.ranks[0].version)
            == str(len(self.weights) - 1)
        )
        assert self.bits() == self.weights[-1]
        assert len(self.admin.engine.ranks[0].prepared) == sum(
            self.states[path] == "prepared" for path in live
        )


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(3))
async def test_random_histories(tmp_path: Path, seed: int) -> None:
    """After every step of a random history the model holds."""
    async with running(tmp_path, engine_poll_s=60) as admin:
        model = Model(admin, seed)
        for _ in range(STEPS):
            await model.step()
        assert len(model.weights) > 10
