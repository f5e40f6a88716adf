"""An admin beside a model of it: how it is asked, and what has to be true whatever was asked."""

import asyncio
import itertools
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import httpx
from blake3 import blake3
from hypothesis.stateful import RuleBasedStateMachine, invariant

from tests.app.machine_model import STACK, Model, Sent, Txn
from tests.app.test_reload import changed
from tests.fakes.admin import Admin, code, running, until
from tests.fakes.checkpoint import write_checkpoint
from tests.fakes.engine import EXPERTS, FakeEngine
from tests.fakes.safetensors import parse

T = TypeVar("T")


class Harness(RuleBasedStateMachine):
    """An admin on a fake engine of two ranks; rules come from whoever derives from it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self._keys = itertools.count()
        self.exports = itertools.count()
        self._runner = asyncio.Runner()
        self._folder = tempfile.TemporaryDirectory()
        self.root = Path(self._folder.name)
        self.engine = FakeEngine(2, base=write_checkpoint(self.root / "models" / "base"))
        self.others = [self.root / "models" / f"other{seed}" for seed in (1, 2)]
        for seed, path in enumerate(self.others, 1):
            write_checkpoint(path, changed(seed))
        self.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result; what is in the background runs meanwhile."""
        return self._runner.run(work)

    def start(self) -> None:
        """An admin on what is there."""
        self.stack = AsyncExitStack()
        # So little undo that most ways back lead over the base; a reload's still fits.
        service = running(self.root / "state", engine=self.engine, undo_bytes=6000)
        self.admin: Admin = self.run(self.stack.enter_async_context(service))

    def teardown(self) -> None:
        """End the service."""
        self.run(self.stack.aclose())
        self._runner.close()
        self._folder.cleanup()

    # -- requests -------------------------------------------------------------------------

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Without a key."""
        return self.run(self.admin.http.request(method, path, **options))

    def keyed(
        self, method: str, path: str, headers: dict[str, str] | None = None, **options: Any
    ) -> httpx.Response:
        """Under a new key; a good answer has to be given again for ever."""
        headers = {"idempotency-key": f"k{next(self._keys)}"} | (headers or {})
        answer = self.ask(method, path, headers=headers, **options)
        if answer.is_success:
            self.model.sent.append(Sent(method, path, headers, options, answer))
        return answer

    def change(
        self,
        method: str,
        path: str,
        expected: str | None,
        fault: str | None,
        refusal: str | None,
        followed: bool = False,
        **options: Any,
    ) -> bool:
        """A request for a new version, perhaps followed by an operation; whether it has to have made one."""
        model = self.model
        tags = {"current": f'"{model.current}"', "old": f'"{model.current + 1}"', "*": "*"}
        headers = {"if-match": tags[expected]} if expected else {}
        if refusal in (None, "nothing_to_apply", "version_moved", "version_not_held") and expected == "old":
            refusal = "precondition_failed"
        if fault:
            self.engine.faults.commit[1] = fault
        if followed:
            headers["prefer"] = "respond-async"
        answer = self.keyed(method, path, headers | options.pop("headers", {}), **options)
        ended = self.finished(answer) if answer.status_code == 202 else None
        self.engine.faults.commit.clear()
        refusal = refusal or ("commit_undone" if fault else None)
        if refusal:
            assert (ended["problem"]["code"] if ended else code(answer)) == refusal, answer.text
            return False
        receipt = ended["receipt"] if ended else answer.json()
        assert (receipt["version"], receipt["base_version"]) == (str(model.current + 1), str(model.current))
        if not followed:
            assert (answer.status_code, answer.headers["etag"]) == (200, f'"{model.current + 1}"')
        return True

    def finished(self, begun: httpx.Response) -> dict[str, Any]:
        """The operation that was begun, once it has ended."""
        operations = self.admin.service.operations
        id = begun.headers["location"].rpartition("/")[2]
        # What tidies up after a change can take a little longer than its outcome.
        self.run(until(lambda: operations.get(id).state != "running" and not self.admin.service.changes.busy))
        ended: dict[str, Any] = self.ask("GET", begun.headers["location"]).json()
        return ended

    def some(self, pick: int) -> Txn:
        """A transaction, mostly one that has not ended."""
        live = [one for one in self.model.transactions if one.live]
        chosen = live if live and pick % 5 else self.model.transactions
        return chosen[pick % len(chosen)]

    def listed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("GET", "/v1/transactions").json()["transactions"]
        return found

    # -- what is always true --------------------------------------------------------------

    @invariant()
    def transactions_agree(self) -> None:
        """States, order of uploads, and files."""
        found = {f"/v1/transactions/{one['id']}": one for one in self.listed()}
        assert {path: one["state"] for path, one in found.items()} == {
            one.path: one.state for one in self.model.transactions
        }
        for one in self.model.transactions:
            if not one.live:
                continue
            digests = [blake3(upload.content).hexdigest() for upload in one.uploads]
            assert [upload["blake3"] for upload in found[one.path]["uploads"]] == digests
        assert self.tidy()

    def tidy(self) -> bool:
        """Whether files and prepared work are those of transactions that can go on, and no others."""
        live = [one for one in self.model.transactions if one.live]
        prepared = sum(one.on_engine for one in live)
        files = sum(len(one.uploads) for one in live)
        held = [len(rank.prepared) for rank in self.engine.ranks]
        return len(self.admin.files) == files and held == [prepared, prepared]

    @invariant()
    def history_agrees(self) -> None:
        """Every version is there and can be gone back to; names stand for what they should."""
        listed = self.ask("GET", "/v1/versions").json()
        assert listed["current"] == str(self.model.current)
        versions = range(self.model.current + 1)
        assert [(one["version"], one["held"]) for one in listed["versions"]] == [
            (str(n), True) for n in versions
        ]
        names = self.ask("GET", "/v1/baselines").json()["baselines"]
        assert {one["name"]: int(one["version"]) for one in names} == self.model.baselines
        assert self.ask("GET", "/health/ready").json()["version"] == str(self.model.current)

    @invariant()
    def weights_agree(self) -> None:
        """On every rank, by digests and as read back."""
        weights = self.model.versions[-1]
        expected = {name: blake3(bits.tobytes()).hexdigest() for name, bits in weights.items()}
        for rank in self.ask("GET", "/v1/digests").json()["ranks"]:
            assert {one["name"]: one["blake3"] for one in rank["tensors"]} == expected
        answer = self.ask("GET", "/v1/experts/1/2")
        assert answer.headers["etag"] == f'"{self.model.current}"'
        for short, (_, _, data) in parse(answer.content).items():
            bits = weights[STACK.format(1, short)]
            size = len(bits) // EXPERTS
            assert data == bits[2 * size : 3 * size].tobytes()
