"""The engine as the admin knows it: attached or not, known or unknown."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from app.engine import EngineClient, EngineUnreachable
from app.logs import event
from app.served import ServedFolder
from app.settings import Settings
from loaders.catalogue import Catalogue
from schemas import bridge
from schemas.problems import Code, ProblemError

_log = logging.getLogger(__name__)

_LASTING = frozenset({Code.STATE_UNKNOWN, Code.BASE_CHANGED, Code.LEDGER_DAMAGED, Code.VERSION_LOST})
"""What looking at the same engine again does not change."""


@dataclass(frozen=True)
class Engine:
    """An engine that has described itself; `boots` maps rank → boot id."""

    description: bridge.EngineDescription
    catalogue: Catalogue
    boots: dict[int, str]
    served: ServedFolder


class EngineLink:
    """Finds the engine, notices when it is another one, and says whether it may be changed."""

    def __init__(self, client: EngineClient, settings: Settings) -> None:
        self.client = client
        self.last: bridge.EngineState | None = None
        """The engine as it was last seen."""
        self.reachable = False
        self.refusal: ProblemError | None = None
        """Why the engine must not be changed nor called ready, if so."""
        self.recover: Callable[[Engine], Awaitable[None]] = _nothing
        """Has an engine that was found at the current version; whoever knows how puts it here."""
        self.settle_s = settings.engine_settle_s
        """How long to look for the outcome of a commit whose answer was lost."""
        self._hang_s = settings.engine_hang_s
        self._committing = False
        self._poll_s = settings.engine_poll_s
        self._seek_s = settings.engine_seek_s
        self._engine: Engine | None = None
        self._ended_boots: Mapping[int, str] = {}
        self._lasting = False
        self._refused_boots: Mapping[int, str] = {}
        self._absent = "The engine has not described itself yet."

    @property
    def engine(self) -> Engine | None:
        """The attached engine, if there is one."""
        return self._engine

    @property
    def unknown(self) -> bool:
        """Whether nobody knows which weights the engine runs."""
        return self.refusal is not None and self.refusal.code is Code.STATE_UNKNOWN

    @property
    def hung(self) -> bool:
        """Whether the engine has been silent for longer than it may; in a commit that is another bound's."""
        return not self._committing and self.client.silent_s > self._hang_s

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Within this, the engine may be silent for as long as a commit may take."""
        self._committing = True
        try:
            yield
        finally:
            self._committing = False

    @property
    def problem(self) -> str | None:
        """Why the engine can't be changed now, if so."""
        if self.refusal is not None:
            return self.refusal.detail
        return None if self._engine is not None and self.reachable else self._absent

    def require(self) -> Engine:
        """The attached engine; raises engine_unavailable."""
        if self._engine is None:
            raise ProblemError(Code.ENGINE_UNAVAILABLE, self._absent)
        return self._engine

    def require_reachable(self) -> Engine:
        """The attached engine if it answered when it was last asked; raises engine_unavailable."""
        if not self.reachable:
            raise ProblemError(Code.ENGINE_UNAVAILABLE, self._absent)
        return self.require()

    def require_known(self) -> None:
        """Raises state_unknown, recovering, base_changed, ledger_damaged, version_lost."""
        if self.refusal is not None:
            raise ProblemError(self.refusal.code, self.refusal.detail, **self.refusal.members)

    def require_writable(self) -> Engine:
        """The attached engine if it may be changed; raises what `require_known` does, engine_unavailable."""
        self.require_known()
        return self.require()

    def mark_unknown(self, reason: str, boots: Mapping[int, str]) -> None:
        """Refuse all changes while the engine is the one of `boots`, unless that has been ended already."""
        if boots and boots == self._ended_boots:
            return
        self._refuse(ProblemError(Code.STATE_UNKNOWN, reason), boots)
        self._detach()

    def expect_another(self) -> None:
        """The engine has been ended; what was held against it is not held against the next."""
        if not self._lasting:
            self.refusal = None
        self._ended_boots = boots_of(self.last) if self.last else {}
        self.client.heard()
        self._detach()

    def reconsider(self) -> None:
        """Refuse all changes until the engine has been looked at again and found to be where it should."""
        self.refusal = ProblemError(Code.RECOVERING, "The outcome of the last change is being found out.")
        self._refused_boots = {}
        self._detach()

    def give_up(self, error: ProblemError) -> None:
        """Refuse all changes, whatever the engine is: this service can't keep what it would promise."""
        self._refuse(error, {})
        self._lasting = True

    async def watch(self) -> None:
        """Look for the engine for ever."""
        while True:
            try:
                await self.look()
            except ProblemError as error:
                self.reachable = False
                self._absent = error.detail
                if error.code is Code.STATE_UNKNOWN and not self._lasting:
                    self._refuse(error, {})
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
            if isinstance(error, EngineUnreachable):
                self.reachable, self._absent = False, error.detail
            raise
        self.last, self.reachable = state, True
        if boots_of(state) != engine.boots:
            self._detach()
            raise ProblemError(Code.ENGINE_UNAVAILABLE, self._absent)
        return state

    def moved(self, version: int) -> None:
        """Every rank was just seen to run `version`; what else is known of them is as old as it was."""
        if self.last is not None:
            ranks = tuple(rank.model_copy(update={"version": version}) for rank in self.last.ranks)
            self.last = self.last.model_copy(update={"ranks": ranks})

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
        self.last, self.reachable = state, True
        catalogue = await asyncio.to_thread(Catalogue, description.tensors, description.model)
        engine = Engine(description, catalogue, boots_of(state), ServedFolder(description.checkpoint))
        if self.refusal is not None and (self._lasting or engine.boots == self._refused_boots):
            self._engine = engine  # to be looked at, no more
            return
        # Before the engine counts as attached, so that nothing is built on it meanwhile.
        self.refusal = ProblemError(Code.RECOVERING, "The engine is being brought to the current version.")
        self._engine = engine
        await self._recover(engine)

    async def _recover(self, engine: Engine) -> None:
        try:
            await self.recover(engine)
        except ProblemError as error:
            self._detach()
            if error.code is Code.ENGINE_UNAVAILABLE:
                self.refusal = None
                raise
            _log.warning("recovery: %s", error)
            if error.code in _LASTING:
                self._refuse(error, engine.boots)
            else:
                self.refusal = ProblemError(Code.RECOVERING, f"Not yet: {error.detail}")
        except BaseException:
            self._detach()
            self.refusal = None
            raise
        else:
            if self._engine is engine:  # else a request found out meanwhile that it is another one
                self.refusal = None
                event(_log, logging.INFO, "the engine is at the current version", ranks=engine.boots)

    def _refuse(self, error: ProblemError, boots: Mapping[int, str]) -> None:
        self.refusal, self._refused_boots = error, boots

    def _detach(self) -> None:
        self._engine = None
        self._absent = "The engine has been restarted and is being looked at again."


async def _nothing(engine: Engine) -> None:
    """Every engine is as it should be."""


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
