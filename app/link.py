"""The engine as the admin knows it: attached or not, known or unknown."""

import asyncio
import logging
from dataclasses import dataclass

from app.engine import EngineClient
from app.ledger import Ledger
from app.settings import Settings
from loaders.catalogue import Catalogue
from schemas import bridge
from schemas.problems import Code, ProblemError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engine:
    """An engine that has described itself; `boots` maps rank → boot id."""

    description: bridge.EngineDescription
    catalogue: Catalogue
    boots: dict[int, str]


class EngineLink:
    """Finds the engine, notices when it is another one, and says whether it may be changed."""

    def __init__(self, client: EngineClient, ledger: Ledger, settings: Settings) -> None:
        self.client = client
        self.last: bridge.EngineState | None = None
        """The engine as it was last seen."""
        self.reachable = False
        self.unknown: str | None = None
        """Why nobody knows which weights the engine runs, if so."""
        self._ledger = ledger
        self.settle_s = settings.engine_settle_s
        """How long to look for the outcome of a commit whose answer was lost."""
        self._poll_s = settings.engine_poll_s
        self._seek_s = settings.engine_seek_s
        self._engine: Engine | None = None
        self._unknown_boots: dict[int, str] = {}
        self._absent = "The engine has not described itself yet."

    @property
    def engine(self) -> Engine | None:
        """The attached engine, if there is one."""
        return self._engine

    @property
    def problem(self) -> str | None:
        """Why the engine can't be changed now, if so."""
        if self.unknown is not None:
            return self.unknown
        return None if self._engine is not None and self.reachable else self._absent

    def require(self) -> Engine:
        """The attached engine; raises engine_unavailable."""
        if self._engine is None:
            raise ProblemError(Code.ENGINE_UNAVAILABLE, self._absent)
        return self._engine

    def require_known(self) -> None:
        """Raises state_unknown."""
        if self.unknown is not None:
            raise ProblemError(Code.STATE_UNKNOWN, self.unknown)

    def require_writable(self) -> Engine:
        """The attached engine if its weights are known; raises state_unknown, engine_unavailable."""
        self.require_known()
        return self.require()

    def mark_unknown(self, reason: str, boots: dict[int, str]) -> None:
        """Refuse all changes while the engine is the one of `boots`.

        One that has been started anew since, and runs the current version, is fine again.
        """
        self.unknown = reason
        self._unknown_boots = boots
        self._detach()

    async def watch(self) -> None:
        """Look for the engine for ever."""
        while True:
            try:
                await self.look()
            except ProblemError as error:
                self.reachable = False
                self._absent = error.detail
            except Exception:  # noqa: BLE001 - whatever an engine says must not end the watch over it
                _log.exception("looking for the engine")
                self.reachable = False
                self._absent = "What the engine says of itself is not understood; see the log."
            await asyncio.sleep(self._poll_s if self.reachable else self._seek_s)

    async def look(self) -> None:
        """Attach, or see whether the attached engine is still the same. Raises ProblemError."""
        if self._engine is None:
            await self._attach()
        else:
            await self.state()

    async def state(self, within_s: float | None = None) -> bridge.EngineState:
        """Where the attached engine stands; engine_unavailable if it has been restarted."""
        engine = self.require()
        try:
            state = await self.client.state(within_s)
        except ProblemError as error:
            if error.code is Code.STATE_UNKNOWN:
                self.mark_unknown(error.detail, engine.boots)
            raise
        self.last, self.reachable = state, True
        if boots_of(state) != engine.boots:
            self._detach()
            raise ProblemError(Code.ENGINE_UNAVAILABLE, self._absent)
        return state

    async def state_at(self, version: int) -> bridge.EngineState:
        """Where the engine stands, provided that every rank runs `version`; else state_unknown."""
        state = await self.state()
        if any(rank.version != version for rank in state.ranks):
            reason = f"Not every rank runs version {version}."
            self.mark_unknown(reason, boots_of(state))
            raise ProblemError(Code.STATE_UNKNOWN, reason, ranks=_rank_versions(state))
        return state

    async def _attach(self) -> None:
        await self.client.load_secret()
        description = await self.client.describe()
        if description.protocol != bridge.PROTOCOL:
            theirs = description.protocol
            detail = f"The engine speaks bridge protocol {theirs}, this service {bridge.PROTOCOL}."
            raise ProblemError(Code.ENGINE_UNAVAILABLE, detail)
        state = await self.client.state()
        catalogue = await asyncio.to_thread(Catalogue, description.tensors, description.model)
        self.last, self.reachable = state, True
        if self.unknown is None or boots_of(state) != self._unknown_boots:
            self.unknown = self._adopt(state)
            self._unknown_boots = boots_of(state)
        self._engine = Engine(description, catalogue, boots_of(state))

    def _adopt(self, state: bridge.EngineState) -> str | None:
        """Take the engine's version over into the ledger; why that can't be, if so."""
        versions = {rank.version for rank in state.ranks}
        if len(versions) != 1:
            return "The engine's ranks run different versions; restart the engine."
        self._ledger.undo = undo_of(state)
        try:
            self._ledger.adopt(versions.pop())
        except ValueError as error:
            return f"{error} Restart this service to start a new history, or restore the engine."
        return None

    def _detach(self) -> None:
        self._engine = None
        self._absent = "The engine has been restarted and is being looked at again."


def boots_of(state: bridge.EngineState) -> dict[int, str]:
    """Rank → boot id."""
    return {rank.rank: rank.boot for rank in state.ranks}


def undo_of(state: bridge.EngineState) -> dict[int, int]:
    """Version → undo bytes on the rank that holds most, for versions that all ranks hold."""
    held = [{int(version): nbytes for version, nbytes in rank.undo.items()} for rank in state.ranks]
    if not held:
        return {}
    common = set(held[0]).intersection(*held[1:])
    return {version: max(rank[version] for rank in held) for version in sorted(common)}


def _rank_versions(state: bridge.EngineState) -> list[dict[str, object]]:
    return [{"rank": r.rank, "boot": r.boot, "version": str(r.version)} for r in state.ranks]
