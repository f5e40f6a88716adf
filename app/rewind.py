"""The way back to a version whose undo is gone: from the base checkpoint's files and kept uploads."""

import asyncio

from app.base import Base
from app.blobs import Blobs
from app.ledger import Ledger
from app.lineage import Lineage, compacted, places_between
from app.link import Engine
from schemas.problems import Code, ProblemError


class Rewind:
    """Makes the uploads that turn the current version's weights into those of another."""

    def __init__(self, ledger: Ledger, base: Base, blobs: Blobs) -> None:
        self._ledger = ledger
        self._base = base
        self._blobs = blobs

    async def uploads(self, target: int, engine: Engine) -> Lineage:
        """Dense writes from the base for what was touched since, then what `target` has over the base.

        Raises version_not_held, base_changed, ledger_damaged.
        """
        current = self._ledger.lineage(self._ledger.current.version)
        wanted = self._ledger.lineage(target)
        if current is None or wanted is None:
            raise ProblemError(Code.VERSION_NOT_HELD, f"The uploads of version {target} are no longer held.")
        reset, rest = await asyncio.to_thread(places_between, current, wanted)
        files = await self._base.files(engine.description)
        rest = await self._blobs.checked(rest)
        try:
            base = await asyncio.to_thread(files.uploads, reset)
        except KeyError as error:
            raise ProblemError(Code.BASE_CHANGED, f"The base checkpoint has no tensor {error}.") from error
        return compacted((*base, *rest))
