"""Asking all workers: nonces, order, jobs that take long, fail or never end."""

import asyncio
from typing import Any

import pytest

from loaders.engine.rpc_client import Workers
from schemas.problems import Code, ProblemError
from tests.loaders.engine.engines import Engine, Ranks


def ask(engine: Engine, method: str = "graft_state", *arguments: str) -> Any:
    return asyncio.run(Workers(engine).ask(method, *arguments))


@pytest.mark.parametrize("answer", ['{"nonce": "x", "rank": 0, "boot": "b"}', "{", '{"rank": 0}', 3, None])
def test_what_is_no_answer_to_this_call(answer: Any) -> None:
    """An old answer, and anything that is no answer, means that replies are out of step: state unknown."""
    engine = Engine(Ranks())
    engine.ranks.behave("graft_state", 1, lambda *rest: answer)
    with pytest.raises(ProblemError) as refused:
        ask(engine)
    assert refused.value.code is Code.STATE_UNKNOWN


def test_no_answers_at_all() -> None:
    """Silence is not agreement."""
    with pytest.raises(ProblemError) as refused:
        ask(Engine(Ranks(0)))
    assert refused.value.code is Code.STATE_UNKNOWN


def test_every_call_has_its_own_nonce() -> None:
    """Two calls in a row never share one."""
    engine = Engine(Ranks(1))
    nonces: list[str] = []
    engine.ranks.behave(
        "graft_state", 0, lambda rank, nonce: nonces.append(nonce) or engine.ranks.answer(rank, nonce)
    )
    ask(engine)
    ask(engine)
    assert len(set(nonces)) == 2


class Slow:
    """Jobs that are pending for some polls; `given_up` is what was dropped."""

    def __init__(self, engine: Engine, polls: dict[int, int]) -> None:
        self.left = dict(polls)
        self.given_up: list[tuple[int, str]] = []
        self.started: dict[int, str] = {}
        ranks = engine.ranks
        for rank in polls:
            ranks.behave("graft_start", rank, self.start)
            ranks.behave("graft_poll", rank, self.poll)
            ranks.behave("graft_give_up", rank, self.give_up)
        self.ranks = ranks

    def start(self, rank: int, nonce: str, request: str) -> str:
        self.started[rank] = nonce
        return self.ranks.answer(rank, nonce)

    def poll(self, rank: int, nonce: str, job: str) -> str:
        assert self.started.get(rank) == job
        if self.left[rank] < 0:
            return self.ranks.answer(rank, nonce, error={"code": "internal", "detail": "no job"})
        self.left[rank] -= 1
        pending = self.left[rank] >= 0
        return self.ranks.answer(rank, nonce, pending=pending, value=None if pending else {"from": rank})

    def give_up(self, rank: int, nonce: str, job: str) -> str:
        self.given_up.append((rank, job))
        return self.ranks.answer(rank, nonce)


def test_jobs_that_end_at_different_times() -> None:
    """Each rank's first result counts; later polls, when its job is gone, do not replace it."""
    engine = Engine(Ranks(3))
    Slow(engine, {0: 4, 1: 0, 2: 2})
    answers = asyncio.run(Workers(engine).run("graft_start", "{}", 30.0))
    assert [answer.value for answer in answers] == [{"from": 0}, {"from": 1}, {"from": 2}]


def test_jobs_that_take_too_long_are_given_up() -> None:
    """The refusal names the bound, and every rank's job is dropped."""
    engine = Engine(Ranks(2))
    slow = Slow(engine, {0: 0, 1: 10**6})
    with pytest.raises(ProblemError, match=r"more than 0\.05 s") as refused:
        asyncio.run(Workers(engine).run("graft_start", "{}", 0.05))
    assert refused.value.code is Code.PREPARE_FAILED
    assert slow.given_up == [(rank, slow.started[rank]) for rank in (0, 1)]


def test_jobs_that_did_not_start_everywhere_are_given_up() -> None:
    """If one rank refuses, the others' jobs end too instead of leaving prepared work behind."""
    engine = Engine(Ranks(2))
    slow = Slow(engine, {0: 1, 1: 1})
    engine.ranks.behave("graft_start", 1, engine.ranks.error("not_supported"))
    answers = asyncio.run(Workers(engine).run("graft_start", "{}", 30.0))
    assert [answer.error is not None for answer in answers] == [False, True]
    assert slow.given_up[0] == (0, slow.started[0])
