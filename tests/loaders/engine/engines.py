"""A stand-in for vLLM's engine client: ranks that answer RPCs, and a scheduler that is paused and resumed."""

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

Answering = Callable[..., Any]


class Ranks:
    """Ranks as sessions of dictionaries; `behave` replaces what a rank answers to a method."""

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self.version = [0] * count
        self.behaviour: dict[tuple[str, int], Answering] = {}
        self.calls: list[str] = []
        self.stale: list[str] | None = None
        self.requests: list[set[str]] = [set() for _ in range(count)]
        """Ids of the requests that every rank holds."""

    def behave(self, method: str, rank: int, answering: Answering) -> None:
        self.behaviour[(method, rank)] = answering

    def answer(self, rank: int, nonce: str, **members: Any) -> str:
        return json.dumps({"nonce": nonce, "rank": rank, "boot": f"b{rank}"} | members)

    def error(self, code: str, detail: str = "because") -> Answering:
        return lambda rank, nonce, *rest: self.answer(rank, nonce, error={"code": code, "detail": detail})

    def one(self, method: str, rank: int, nonce: str, *arguments: str) -> Any:
        if (method, rank) in self.behaviour:
            return self.behaviour[(method, rank)](rank, nonce, *arguments)
        if method == "graft_apply":
            request = json.loads(arguments[0])
            self.version[rank] = int(request["version"])
            report = {"nonce": request["nonce"], "rank": rank, "boot": f"b{rank}", "ok": True}
            return self.answer(rank, nonce, value=report)
        if method == "graft_running":
            value = {"version": self.version[rank], "requests": sorted(self.requests[rank])}
            return self.answer(rank, nonce, value=value)
        if method == "graft_undo":
            self.version[rank] = 0
        return self.answer(rank, nonce)

    def call(self, method: str, nonce: str, *arguments: str) -> list[str]:
        self.calls.append(method)
        return [self.one(method, rank, nonce, *arguments) for rank in range(self.count)]


class Engine:
    """The part of `AsyncLLM` that the bridge uses; `faults` says what a method raises or returns."""

    def __init__(self, ranks: Ranks, connector: bool = False) -> None:
        self.ranks = ranks
        self.faults: dict[str, Any] = {}
        self.log: list[str] = []
        self.paused = False
        self.weight_version = "0"
        self.engine_core = self
        self.sleeping = False
        self.drained = asyncio.Event()
        """What a pause of mode `wait` waits for."""
        self.vllm_config = SimpleNamespace(
            kv_transfer_config=object() if connector else None,
            speculative_config=None,
            model_config=SimpleNamespace(is_multimodal_model=False),
        )

    def _do(self, name: str) -> Any:
        self.log.append(name)
        fault = self.faults.get(name)
        if isinstance(fault, BaseException):
            raise fault
        return fault

    async def call_utility_all_async(
        self,
        kind: str,
        method: str,
        timeout: Any,  # noqa: ASYNC109 - vLLM's own name
        args: Any,
        kwargs: Any,
    ) -> Any:
        assert (kind, timeout, kwargs) == ("collective_rpc", None, None)
        self._do(method)
        return [self.ranks.call(method, *args)]

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        assert not clear_cache
        self._do("pause" if mode == "keep" else f"pause {mode}")
        self.paused = True
        if mode == "wait":
            await self.drained.wait()
        self.drained.set()  # a pause that waits for nobody ends the one that does

    async def is_sleeping(self) -> bool:
        return self._do("asleep?") or self.sleeping or self.paused

    async def is_paused(self) -> bool:
        return self.paused

    async def resume_scheduler_async(self) -> None:
        self._do("resume")
        self.paused = False

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert reset_running_requests and reset_connector
        return self._do("prefix") is not False

    async def reset_mm_cache(self) -> None:
        self._do("mm")

    async def reset_encoder_cache(self) -> None:
        self._do("encoder")

    async def update_weight_version(self, version: str) -> None:
        self._do("stamp")
        self.weight_version = version
