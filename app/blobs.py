"""The folder of committed uploads: files named by their BLAKE3, kept while a version needs them."""

import asyncio
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from app.base import REMEDY
from app.failpoints import Failpoints
from app.ledger import Ledger
from app.lineage import Lineage, blobs_of
from app.settings import Settings
from loaders.staged import StagedFile, file_digest, fsync_path, refuse_full_disk
from schemas.bridge import StagedUpload
from schemas.problems import Code, ProblemError

_log = logging.getLogger(__name__)
_AT_ONCE = min(4, os.cpu_count() or 1)
"""Files that are read side by side: the threads that do so write uploads as well, which go on meanwhile."""


class Blobs:
    """Keeps what versions are made of within a budget of bytes. Making it touches no disk.

    A file under its name is complete and durable. It goes only when no version that can be
    rolled back to needs it; which these are is decided here, oldest out first.
    """

    def __init__(self, settings: Settings, ledger: Ledger, failpoints: Failpoints) -> None:
        self.folder = settings.blob_dir
        self.budget = int(settings.blob_bytes)
        self._most = settings.kept_versions
        self._ledger = ledger
        self._failpoints = failpoints
        self._sizes: dict[str, int] = {}
        self._awaited: set[str] = set()
        self._lock = asyncio.Lock()

    @property
    def used(self) -> int:
        """Bytes on disk."""
        return sum(self._sizes.values())

    async def begin(self, awaited: Sequence[StagedUpload]) -> None:
        """Look at what is there; versions whose files are gone are let go, files that none needs are deleted.

        `awaited` are the uploads of a commit whose outcome is not known yet.
        """
        self._sizes = await asyncio.to_thread(self._look)
        self._awaited = set(blobs_of(tuple(awaited)))
        ledger = self._ledger
        missing = {root for root, needed in ledger.needs().items() if not needed <= self._sizes.keys()}
        for root in missing & ledger.pinned():
            _log.error("uploads that version %d needs are missing from %s", root, self.folder)
        ledger.let_go(missing - ledger.pinned())
        await self.tidy()

    def require_room(self, more: Sequence[StagedUpload], lineage: Lineage | None, pinned: set[int]) -> None:
        """Refuse what would pin more than the budget: `lineage` and `pinned` roots, with new files `more`.

        Raises blob_budget.
        """
        sizes = self._sizes | {upload.blake3: upload.nbytes for upload in more}
        needed = set(blobs_of(lineage or ()))
        needed.update(*(blobs for root, blobs in self._ledger.needs().items() if root in pinned))
        nbytes = sum(sizes.get(digest, 0) for digest in needed)
        if nbytes > self.budget:
            raise ProblemError(
                Code.BLOB_BUDGET,
                f"The current version and the baselines would need {nbytes} bytes of uploads; "
                f"GRAFT_BLOB_BYTES allows {self.budget}.",
                needed=nbytes,
                budget=self.budget,
            )

    async def keep(self, files: Sequence[StagedFile]) -> None:
        """Give staged files, which stay where they are too, their lasting names, at least until `settle`.

        Raises disk_full.
        """
        async with self._lock:
            self._awaited = {file.blake3 for file in files}
            # Known before they are there, so that what a fault leaves half way is tidied up.
            self._sizes.update({file.blake3: file.nbytes for file in files})
            await asyncio.to_thread(self._link, files)

    async def settle(self) -> None:
        """The outcome of the commit is in the ledger, which now says which files are needed."""
        self._awaited = set()
        await self.tidy()

    def located(self, upload: StagedUpload) -> StagedUpload:
        """The upload with the path that its file has here, if it is kept here."""
        if upload.external:
            return upload
        return upload.model_copy(update={"path": str(self.folder / upload.blake3)})

    async def checked(self, lineage: Lineage) -> Lineage:
        """The lineage with paths, once all its files have been read and found right.

        Raises ledger_damaged, and base_changed if it is a file that is not kept here.
        """
        located = tuple(self.located(upload) for upload in lineage)
        unique = list({upload.path: upload for upload in located}.values())
        turn = asyncio.Semaphore(_AT_ONCE)

        async def read(upload: StagedUpload) -> str | None:
            async with turn:
                return await asyncio.to_thread(_digest, Path(upload.path))

        found = await asyncio.gather(*map(read, unique))
        for upload, digest in zip(unique, found, strict=True):
            if digest != upload.blake3:
                raise _unusable(upload)
        return located

    async def tidy(self) -> None:
        """Let go of versions and files as the ledger and the budget have it."""
        async with self._lock:
            await self._tidy()

    async def _tidy(self) -> None:
        """Let old versions go that do not fit the budget, and delete files that no version needs.

        A file that can't be deleted is logged; it is tried again the next time.
        """
        ledger = self._ledger
        pinned = ledger.pinned()
        needs = ledger.needs()
        needed = set[str]().union(*(needs[root] for root in pinned & needs.keys()))
        nbytes = sum(self._sizes.get(digest, 0) for digest in needed)
        others = [root for root in needs if root not in pinned]
        gone = others[self._most :]
        for root in others[: self._most]:
            more = needs[root] - needed
            nbytes += sum(self._sizes.get(digest, 0) for digest in more)
            if more and nbytes > self.budget:  # and from here on none that takes more room than there is
                gone.append(root)
            else:
                needed |= more
        ledger.let_go(gone)
        unneeded = self._sizes.keys() - needed - self._awaited
        if unneeded:
            for digest in await asyncio.to_thread(self._unlink, unneeded):
                self._sizes.pop(digest, None)

    def _look(self) -> dict[str, int]:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fsync_path(self.folder.parent)
        return {path.name: path.stat().st_size for path in self.folder.iterdir() if path.is_file()}

    def _link(self, files: Sequence[StagedFile]) -> None:
        with refuse_full_disk():
            for file in files:
                self._failpoints.reach("blob.before")
                fsync_path(file.path)
                try:
                    # A second name: the staged one goes when the transaction does, whichever way it ends.
                    os.link(file.path, self.folder / file.blake3)
                except FileExistsError:
                    continue  # the same bytes were committed before
                self._failpoints.reach("blob.linked")
            fsync_path(self.folder)
            self._failpoints.reach("blob.after")

    def _unlink(self, digests: Iterable[str]) -> list[str]:
        """Which of the files are gone."""
        gone = []
        for digest in sorted(digests):
            self._failpoints.reach("blob.drop")
            try:
                (self.folder / digest).unlink(missing_ok=True)
            except OSError:
                _log.exception("deleting %s", self.folder / digest)
            else:
                gone.append(digest)
        return gone


def _digest(path: Path) -> str | None:
    try:
        return file_digest(path)
    except OSError:
        return None


def _unusable(upload: StagedUpload) -> ProblemError:
    if upload.external:
        detail = f"{upload.path}, which the weights were reloaded from, is missing or another. {REMEDY}"
        return ProblemError(Code.BASE_CHANGED, detail, files=[upload.path])
    return ProblemError(Code.LEDGER_DAMAGED, f"{upload.path} is missing or damaged; put it back.")
