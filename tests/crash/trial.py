"""One death and what comes after it: the last acknowledged version or the one under way, nothing else."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import httpx

from tests.crash.combinations import Combination
from tests.crash.model import Model, State
from tests.crash.rig import Lost, Rig

Ask = Callable[[str], httpx.Response | None]
"""Makes a change under an idempotency key; no answer if the service died."""
OPTIONAL = frozenset(
    {"commit_undone", "state_unknown", "interrupted", "transaction_state", "engine_unavailable"}
)
"""Codes with which a change may have failed that nobody acknowledged."""


class Trial:
    """Goes through deaths on one rig, whose history grows."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.model = Model()
        self._keys = itertools.count(1)
        rig.start()
        rig.wait_ready()
        for state in rig.rehearsal:
            if state.checkpoint != self.model.versions[-1].checkpoint:
                self._do(self.reloaded(state.checkpoint))
            if state.expert:
                self._do(self.uploaded(state.expert))
            assert self.model.versions[-1] == state
            rig.learn(state)

    def run(self, combination: Combination) -> str:
        """What became of it: `kept`, or `not reached`. Raises Lost."""
        self._fresh()
        point, victim = combination.point, combination.victim
        operation: Callable[[str, str], bool] = {
            "commit": self._commit,
            "one-shot": self._one_shot,
            "rollback": self._rollback,
            "rewind": self._rewind,
            "replay": self._replay,
            "reload": self._reload,
            "settle": self._settle,
            "abandon": self._abandon,
            "baseline": self._baseline,
            "begin": self._begin,
        }[combination.operation]
        reached = operation(point, victim)
        self.agree()
        return "kept" if reached else "not reached"

    def _fresh(self) -> None:
        """Two versions to go back to, with their undo."""
        for _ in range(2):
            self._do(self.uploaded(next(self.rig.numbers)))

    def _do(self, ask: Ask) -> None:
        """A change that nobody disturbs; on a machine too busy to reach the engine in time, once more."""
        key = self._key()
        answer = ask(key)
        if answer is not None and answer.status_code == 503 and answer.json()["code"] == "engine_unavailable":
            self.rig.wait_ready()
            answer = ask(key)
        self._require(answer)
        self.model.acknowledge()

    def _key(self) -> str:
        return f"k{next(self._keys)}"

    def uploaded(self, number: int) -> Ask:
        """The upload of an expert, which is what is under way from now on."""
        self.model.maybe = self.model.with_expert(number)
        content = self.rig.expert(number)
        return lambda key: self.rig.ask("PUT", "/v1/experts/0/0", key, content=content)

    def reloaded(self, number: int) -> Ask:
        """The reload of a checkpoint, which is what is under way from now on."""
        self.model.maybe = State(checkpoint=number)
        body = {"path": str(self.rig.checkpoint(number))}
        return lambda key: self.rig.ask("POST", "/v1/reload", key, json=body)

    def _require(self, answer: httpx.Response | None) -> httpx.Response:
        if answer is None or answer.status_code != 200:
            raise Lost(f"a correct request failed: {answer.text if answer else None}")
        return answer

    def _commit(self, point: str, victim: str) -> bool:
        number = next(self.rig.numbers)
        opened = self.rig.ask("POST", "/v1/transactions", json={})
        assert opened is not None
        path = opened.headers["location"]
        self._require(self.rig.ask("PUT", f"{path}/experts/0/0", content=self.rig.expert(number)))
        self.model.maybe = self.model.with_expert(number)
        return self._change(point, victim, lambda key: self.rig.ask("POST", f"{path}/commit", key))

    def _one_shot(self, point: str, victim: str) -> bool:
        return self._change(point, victim, self.uploaded(next(self.rig.numbers)))

    def _reload(self, point: str, victim: str) -> bool:
        return self._change(point, victim, self.reloaded(next(self.rig.checkpoints)))

    def _rollback(self, point: str, victim: str) -> bool:
        target = self.model.current - 1
        self.model.maybe = self.model.versions[target]
        body = {"to_version": target}
        return self._change(point, victim, lambda key: self.rig.ask("POST", "/v1/rollback", key, json=body))

    def _rewind(self, point: str, victim: str) -> bool:
        versions = [str(version) for version in range(self.model.current + 1)]
        self.rig.bridge("POST", "forget", {"nonce": "0" * 32, "versions": versions})
        return self._rollback(point, victim)

    def _baseline(self, point: str, victim: str) -> bool:
        self.rig.arm(point, victim)
        answer = self.rig.ask("PUT", "/v1/baselines/here", json={"version": self.model.current})
        reached = self.rig.wait_for_death(point)
        self._recover()
        found = self.rig.ask("GET", "/v1/baselines/here")
        if answer is not None and answer.status_code == 200:
            self._require(found)
        self.rig.ask("DELETE", "/v1/baselines/here")
        return reached

    def _replay(self, point: str, victim: str) -> bool:
        self.rig.kill("engine")
        self.rig.arm(point, victim)
        self.rig.revive()
        reached = self.rig.wait_for_death(point)
        self._recover()
        return reached

    def _settle(self, point: str, victim: str) -> bool:
        """The admin is killed after the engine's answer; the next one is killed while it finds out."""
        return self._in_doubt("admin", point, victim)

    def _abandon(self, point: str, victim: str) -> bool:
        """Both are killed after the engine's answer; the next ones while they find that it is lost."""
        return self._in_doubt("both", point, victim)

    def _in_doubt(self, first: str, point: str, victim: str) -> bool:
        ask = self.uploaded(next(self.rig.numbers))
        self.rig.arm("bridge.commit.after", first)
        answer = ask(self._key())
        if answer is not None:
            raise Lost(f"the admin did not die: {answer.text}")
        self.rig.kill("admin")
        if first == "both":
            self.rig.kill("engine")
        self.rig.arm(point, victim)
        self.rig.revive()
        reached = self.rig.wait_for_death(point)
        self._recover()
        self._learn(None)
        return reached

    def _begin(self, point: str, victim: str) -> bool:
        """Nothing is there yet; what was begun half way must not be in the way."""
        self.rig.forget_everything()
        self.model = Model()
        self.rig.arm(point, victim)
        self.rig.revive()
        reached = self.rig.wait_for_death(point)
        self._recover()
        return reached

    def _change(self, point: str, victim: str, ask: Ask) -> bool:
        """A change with a death on the way; whether anybody died."""
        reached = False

        @contextmanager
        def death() -> Iterator[None]:
            nonlocal reached
            self.rig.arm(point, victim)
            yield
            reached = self.rig.wait_for_death(point)

        self.change(ask, death())
        return reached

    def change(self, ask: Ask, trouble: AbstractContextManager[object]) -> httpx.Response | None:
        """Ask in trouble, then once more with the same key: made once or not at all. The first answer."""
        key = self._key()
        with trouble:
            answer = ask(key)
        self._recover()
        self._learn(answer)
        made = self.model.maybe is None
        again = ask(key)
        if again is None:
            raise Lost("the service died of a repeated request")
        if made and answer is not None and answer.status_code == 200 and again.content != answer.content:
            raise Lost("a repeated request got another answer")
        if again.status_code == 200:
            if not made:
                self.model.acknowledge()
            if again.json()["version"] != str(self.model.current):
                raise Lost(f"a repeated request made another version: {again.text}")
        elif again.json()["code"] not in OPTIONAL:
            raise Lost(f"a repeated request was refused: {again.text}")
        self.model.maybe = None
        return answer

    def _recover(self) -> None:
        self.rig.disarm()
        self.rig.revive()
        self.rig.wait_ready()

    def _learn(self, answer: httpx.Response | None) -> None:
        """Whether the change under way was made: if it was acknowledged it must have been."""
        version = int(self.rig.wait_ready())
        current = self.model.current
        if version == current + 1 and self.model.maybe is not None:
            self.model.acknowledge()
        elif version != current:
            raise Lost(f"version {version} after {current}")
        elif answer is not None and answer.status_code == 200:
            raise Lost(f"version {current + 1} was acknowledged and is gone")

    def agree(self) -> None:
        """History, engine and model say the same."""
        self.model.maybe = None
        version = self.rig.wait_ready()
        if version != str(self.model.current):
            raise Lost(f"version {version} is served, not {self.model.current}")
        history = self._require(self.rig.ask("GET", "/v1/versions")).json()
        if [one["version"] for one in history["versions"]] != [str(n) for n in range(self.model.current + 1)]:
            raise Lost("the history has gaps")
        self.rig.require_weights(self.model.versions[-1], self.model.current)
