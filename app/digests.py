"""Digests of whole versions: recorded when they are known, compared when an engine should be at one."""

import asyncio
import logging
from collections.abc import Mapping

from blake3 import blake3

from app.engine import EngineClient
from app.journal import Journal
from app.ledger import Ledger
from app.link import Engine, EngineLink
from schemas.bridge import DigestsResult, EngineDescription
from schemas.problems import Code, ProblemError

_log = logging.getLogger(__name__)


class VersionDigests:
    """One digest per rank and version. They are cheap: the engine hashes only what was written since."""

    def __init__(self, link: EngineLink, ledger: Ledger, journal: Journal) -> None:
        self._link = link
        self._ledger = ledger
        self._journal = journal
        self._wanted = asyncio.Event()

    def want(self) -> None:
        """The current version's digests should be recorded, some time soon."""
        self._wanted.set()

    async def record_for_ever(self) -> None:
        """Record the current version's digests whenever that is wanted; versions soon passed by have none."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                if self._link.problem is None:
                    await self._record(self._link.require())
            except ProblemError as error:
                _log.warning("recording digests: %s", error)

    async def known(self, engine: Engine, version: int) -> bool:
        """Whether this kind of engine's digests were recorded at `version`."""
        return await self._journal.digests(version, layout_of(engine.description)) is not None

    async def verify(self, engine: Engine, version: int) -> bool:
        """Whether the engine has the digests that were recorded at `version`; records them if none were.

        Raises busy or engine_unavailable if they can't be had.
        """
        found = await self._take(self._link.client, version)
        layout = layout_of(engine.description)
        recorded = await self._journal.digests(version, layout)
        if recorded is None:
            try:
                await self._journal.put_digests(version, layout, found)
            except ProblemError as error:
                if error.code is not Code.DISK_FULL:
                    raise
                _log.warning("recording the digests of version %d: %s", version, error)
            return True
        return dict(recorded) == dict(found)

    async def _record(self, engine: Engine) -> None:
        version = self._ledger.current.version
        root = self._ledger.root(version)
        layout = layout_of(engine.description)
        found = await self._take(self._link.client, version)
        expected = await self._journal.digests(root, layout)
        if root != version and expected is not None and dict(expected) != dict(found):
            reason = f"Version {version} should have the weights of version {root}, but has others."
            self._link.mark_unknown(reason, engine.boots)
            return
        await self._journal.put_digests(version, layout, found)

    async def _take(self, client: EngineClient, version: int) -> Mapping[int, str]:
        result = await client.digests("")
        if result.version != version:
            raise ProblemError(Code.BUSY, f"The engine is at version {result.version} already.")
        return await asyncio.to_thread(combined, result)


def layout_of(description: EngineDescription) -> str:
    """What kind of engine digests are of: on another kind the same weights have others."""
    kind = description.model_copy(update={"tensors": (), "checkpoint": None})
    kind = kind.model_copy(update={"model": kind.model.model_copy(update={"model": ""})})
    return blake3(kind.model_dump_json().encode()).hexdigest()


def combined(result: DigestsResult) -> dict[int, str]:
    """Rank → one digest of all its digests."""
    return {
        rank.rank: blake3("\n".join(f"{t.name} {t.blake3}" for t in rank.tensors).encode()).hexdigest()
        for rank in result.ranks
    }
