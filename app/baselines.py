"""Named versions: what they need stays within reach while the name exists."""

from app.blobs import Blobs
from app.feed import Feed
from app.journal import Journal
from app.ledger import BaselineRecord, Ledger
from schemas.events import BaselineEvent


class Baselines:
    """Names and unnames versions, in the ledger first."""

    def __init__(self, journal: Journal, ledger: Ledger, blobs: Blobs, feed: Feed, undo_budget: int) -> None:
        self._journal = journal
        self._ledger = ledger
        self._blobs = blobs
        self._feed = feed
        self._undo_budget = undo_budget

    async def put(self, name: str, version: int) -> BaselineRecord:
        """Keep `version` within reach. Raises version_not_held, undo_budget, blob_budget, disk_full."""
        record = self._ledger.new_baseline(name, version, self._undo_budget)
        pinned = {self._ledger.root(version)} | self._ledger.pinned()
        self._blobs.require_room((), None, pinned)
        # Before it is written: what it needs must not be tidied away meanwhile.
        before = next((b for b in self._ledger.baselines() if b.name == name), None)
        self._ledger.set_baseline(record)
        try:
            await self._journal.put_baseline(record)
        except BaseException:
            self._ledger.delete_baseline(name)
            if before is not None:
                self._ledger.set_baseline(before)
            raise
        self._feed.publish(BaselineEvent(name=name, version=version))
        await self._blobs.tidy()
        return record

    async def delete(self, name: str) -> None:
        """Let the name go; raises unknown_baseline, disk_full."""
        self._ledger.baseline(name)
        await self._journal.delete_baseline(name)
        self._ledger.delete_baseline(name)
        self._feed.publish(BaselineEvent(name=name, version=None))
        await self._blobs.tidy()
