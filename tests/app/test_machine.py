"""Any history of requests, faults and restarts: states, versions, weights and files are as the model says."""

from typing import Any

import numpy as np
from blake3 import blake3
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.app.machine import Harness
from tests.app.machine_model import Body, Txn, batch, expert, plain
from tests.app.test_reload import changed
from tests.fakes.admin import OCTETS, code, until
from tests.fakes.engine import EXPERTS, LAYERS, base_weights
from tests.fakes.safetensors import parse

SEEDS = st.integers(0, 10**6)
PICKS = st.integers(0, 20)
LAYER = st.integers(0, LAYERS - 1)
BODIES = st.one_of(
    st.builds(expert, LAYER, st.integers(0, EXPERTS - 1), SEEDS),
    st.builds(plain, LAYER, SEEDS),
    st.builds(batch, LAYER, SEEDS),
)
EXPECTED = st.sampled_from([None, None, "*", "current", "old"])
"""What a request says of the version that it builds on."""
FAULTS = st.sampled_from([None, None, None, "before", "middle", "after"])
"""Where a rank fails during the commit."""
BASES = st.sampled_from([None, None, "current", "old"])
NAMES = st.sampled_from(["a", "b", "c"])


class Machine(Harness):
    """Every route that changes state."""

    # -- transactions ---------------------------------------------------------------------

    @rule(base=BASES, upload=BODIES, further=st.sampled_from(["upload", "prepare", "commit"]))
    def open(self, base: str | None, upload: Body, further: str) -> None:
        """A new transaction, perhaps for one version only, with an upload; perhaps it goes on at once."""
        number = {"current": self.model.current, "old": self.model.current + 1}.get(base or "")
        answer = self.keyed(
            "POST", "/v1/transactions", json={} if number is None else {"base_version": number}
        )
        if base == "old":
            assert code(answer) == "version_moved"
            return
        assert answer.status_code == 201
        one = Txn(answer.headers["location"], number)
        self.model.transactions.append(one)
        self._into(one, upload)
        if further == "prepare":
            self._prepare(one)
        elif further == "commit":
            self._commit(one)

    @rule()
    def open_empty(self) -> None:
        """A new transaction with nothing in it."""
        self.model.transactions.append(Txn(self.keyed("POST", "/v1/transactions").headers["location"], None))

    @precondition(lambda self: self.model.transactions)
    @rule(pick=PICKS, upload=BODIES)
    def upload(self, pick: int, upload: Body) -> None:
        """Into a transaction; one that has ended refuses."""
        self._into(self.some(pick), upload)

    def _into(self, one: Txn, upload: Body) -> None:
        answer = self.keyed(upload.method, f"{one.path}/{upload.path}", dict(OCTETS), content=upload.content)
        if one.refusal:
            assert code(answer) == one.refusal
            return
        assert answer.status_code == 200, answer.text
        assert answer.json()["blake3"] == blake3(upload.content).hexdigest()
        one.take(upload)

    @precondition(lambda self: self.model.transactions)
    @rule(pick=PICKS, upload=BODIES, where=st.sampled_from(["experts/0/9", "experts/0/0", "patches"]))
    def upload_wrong(self, pick: int, upload: Body, where: str) -> None:
        """A body cut short is refused, and changes nothing."""
        path = f"{self.some(pick).path}/{where}"
        answer = self.ask(
            "POST" if where == "patches" else "PUT", path, content=upload.content[:-1], headers=OCTETS
        )
        assert answer.status_code in (404, 409, 410, 422)

    @precondition(lambda self: self.model.transactions)
    @rule(pick=PICKS)
    def prepare(self, pick: int) -> None:
        """Phase one."""
        self._prepare(self.some(pick))

    def _prepare(self, one: Txn) -> None:
        answer = self.ask("POST", f"{one.path}/prepare")
        if refusal := self._unfit(one):
            assert code(answer) == refusal
            return
        assert (answer.status_code, answer.json()["version"]) == (200, str(self.model.current))
        one.state, one.on_engine = "prepared", True

    @precondition(lambda self: self.model.transactions)
    @rule(pick=PICKS, expected=EXPECTED, fault=FAULTS, followed=st.booleans())
    def commit(self, pick: int, expected: str | None, fault: str | None, followed: bool) -> None:
        """All of a transaction or nothing."""
        self._commit(self.some(pick), expected, fault, followed)

    def _commit(
        self, one: Txn, expected: str | None = None, fault: str | None = None, followed: bool = False
    ) -> None:
        refusal = self._unfit(one)
        if self.change("POST", f"{one.path}/commit", expected, fault, refusal, followed):
            one.end("committed")
            self.model.commit(one.uploads)
        elif fault and not refusal and expected != "old":
            one.end("failed")

    def _unfit(self, one: Txn) -> str | None:
        if one.refusal:
            return one.refusal
        if one.base not in (None, self.model.current):
            return "version_moved"
        return None if one.uploads else "nothing_to_apply"

    @precondition(lambda self: self.model.transactions)
    @rule(pick=PICKS)
    def abort(self, pick: int) -> None:
        """Drop it; again is fine."""
        one = self.some(pick)
        answer = self.ask("DELETE", one.path)
        if one.refusal and one.state != "aborted":
            assert code(answer) == one.refusal
        else:
            assert (answer.status_code, answer.json()["state"]) == (200, "aborted")
            one.end("aborted")

    @precondition(lambda self: any(one.live for one in self.model.transactions))
    @rule(pick=PICKS)
    def expire(self, pick: int) -> None:
        """Time passes for one of them."""
        live = [one for one in self.model.transactions if one.live]
        one = live[pick % len(live)]
        found = self.admin.service.transactions.get(one.path.rpartition("/")[2])
        found._deadline = 0.0
        one.end("expired")
        self.run(until(lambda: found.state == "expired" and self.tidy()))

    # -- versions -------------------------------------------------------------------------

    @rule(upload=BODIES, expected=EXPECTED, base=BASES, fault=FAULTS)
    def one_shot(self, upload: Body, expected: str | None, base: str | None, fault: str | None) -> None:
        """Upload and commit in one request; the transaction behind it can be seen."""
        number = {"current": self.model.current, "old": self.model.current + 1}.get(base or "")
        options: dict[str, Any] = {"params": {"base_version": number}} if base else {}
        options |= {"headers": dict(OCTETS), "content": upload.content}
        refusal = "version_moved" if base == "old" else None
        before = {one["id"] for one in self.listed()}
        made = self.change(upload.method, f"/v1/{upload.path}", expected, fault, refusal, **options)
        for one in self.listed():
            if one["id"] not in before:
                state = "committed" if made else one["state"]
                self.model.transactions.append(Txn(f"/v1/transactions/{one['id']}", number, state))
                assert state in ("committed", "failed", "aborted")
        if made:
            self.model.commit([upload])

    @rule(
        pick=PICKS,
        expected=EXPECTED,
        fault=FAULTS,
        name=st.one_of(st.none(), NAMES),
        followed=st.booleans(),
    )
    def roll_back(
        self, pick: int, expected: str | None, fault: str | None, name: str | None, followed: bool
    ) -> None:
        """To any version or baseline, or to one that has never been."""
        target = self.model.baselines.get(name) if name else pick % (self.model.current + 2)
        known = target is not None and target <= self.model.current
        request = {"to_baseline": name} if name else {"to_version": target}
        refusal = None if known else "version_not_held"
        if name and not known and expected == "old":
            expected = None  # what a name stands for is looked up first
        if self.change("POST", "/v1/rollback", expected, fault, refusal, followed, json=request):
            assert target is not None
            self.model.roll_back(target)

    @rule(pick=PICKS, expected=EXPECTED, fault=FAULTS)
    def reload(self, pick: int, expected: str | None, fault: str | None) -> None:
        """The base or one of two other folders."""
        path = [self.engine.base, *self.others][pick % 3]
        if self.change("POST", "/v1/reload", expected, fault, None, bool(pick % 2), json={"path": str(path)}):
            weights = base_weights()
            if pick % 3:
                found = changed(pick % 3)
                weights = {
                    n: np.frombuffer(data, weights[n].dtype).copy() for n, (_, _, data) in found.items()
                }
            self.model.reload(weights)

    @rule(name=NAMES, pick=PICKS, current=st.booleans())
    def name(self, name: str, pick: int, current: bool) -> None:
        """A baseline, made or moved."""
        version = self.model.current if current else pick % (self.model.current + 2)
        answer = self.keyed("PUT", f"/v1/baselines/{name}", json={} if current else {"version": version})
        if version > self.model.current:
            assert code(answer) == "version_not_held"
            return
        assert (answer.status_code, answer.json()["version"]) == (200, str(version)), answer.text
        self.model.baselines[name] = version

    @precondition(lambda self: self.model.baselines)
    @rule(name=NAMES)
    def unname(self, name: str) -> None:
        """A baseline, gone."""
        answer = self.ask("DELETE", f"/v1/baselines/{name}")
        if self.model.baselines.pop(name, None) is None:
            assert code(answer) == "unknown_baseline"
        else:
            assert answer.status_code == 204

    @rule(pick=PICKS)
    def export(self, pick: int) -> None:
        """A version as a folder, if the engine has its weights."""
        version = pick % (self.model.current + 1)
        target = self.root / "models" / f"export{next(self.exports)}"
        answer = self.ask("POST", f"/v1/versions/{version}/export", json={"path": str(target)})
        if self.model.roots[version] != self.model.roots[-1]:
            assert code(answer) == "version_not_held"
            return
        assert self.finished(answer)["state"] == "done"
        found: dict[str, bytes] = {}
        for path in target.glob("*.safetensors"):
            found |= {name: data for name, (_, _, data) in parse(path.read_bytes()).items()}
        assert found == {name: bits.tobytes() for name, bits in self.model.versions[-1].items()}

    # -- again, and after an end ----------------------------------------------------------

    @precondition(lambda self: self.model.sent)
    @rule(pick=st.integers(0, 10**6))
    def again(self, pick: int) -> None:
        """A request that comes again gets its first answer, and does nothing."""
        sent = self.model.sent[pick % len(self.model.sent)]
        answer = self.ask(sent.method, sent.path, headers=dict(sent.headers), **sent.options)
        assert (answer.status_code, answer.content) == (sent.answer.status_code, sent.answer.content)
        for name in ("etag", "location"):
            assert answer.headers.get(name) == sent.answer.headers.get(name)

    @precondition(lambda self: self.model.sent)
    @rule(pick=st.integers(0, 10**6))
    def again_with_another_body(self, pick: int) -> None:
        """A key belongs to one request."""
        sent = self.model.sent[pick % len(self.model.sent)]
        headers = {"idempotency-key": sent.headers["idempotency-key"]}
        answer = self.ask(
            "POST", "/v1/rollback", headers=headers, json={"to_version": 0, "in_flight": "abort"}
        )
        assert code(answer) == "idempotency_mismatch"

    @rule(engine=st.booleans(), admin=st.booleans())
    def restart(self, engine: bool, admin: bool) -> None:
        """The engine begins at its base, the admin with what is on disk; transactions are interrupted."""
        if admin:
            self.run(self.stack.aclose())
        if engine:
            self.engine.restart()
        for one in self.model.transactions:
            one.on_engine = one.on_engine and not engine
            if admin and one.live:
                one.end("interrupted")
        if admin:
            self.start()
        link = self.admin.service.link
        boots = {rank.rank: rank.boot for rank in self.engine.ranks}
        self.run(until(lambda: link.engine and link.engine.boots == boots and not link.problem))


Machine.TestCase.settings = settings(
    max_examples=12,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
test_any_history = Machine.TestCase
