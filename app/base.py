"""The base that the history stands on: what was recorded of it, and whether it is still the same."""

import asyncio
import logging
from pathlib import Path

from app.journal import Journal
from app.link import Engine
from app.records import BaseRecord, Loaded
from loaders.folder import CheckpointFolder
from loaders.header import HeaderLimits
from schemas.bridge import EngineDescription
from schemas.problems import Code, ProblemError

_log = logging.getLogger(__name__)
_LIMITS = HeaderLimits(nbytes=256 << 20)

REMEDY = "Put the old checkpoint back, or begin a new history in another state folder."


class Base:
    """Version 0's checkpoint, as it was recorded and as it lies on disk now."""

    def __init__(self, journal: Journal) -> None:
        self.record: BaseRecord | None = None
        """None until an engine was met at version 0."""
        self.loaded: Loaded | None = None
        self._journal = journal

    async def proved(self, engine: Engine) -> None:
        """The engine has the base's weights; if it is new, so have the files that it was just loaded from."""
        if self.loaded is not None and self.loaded.boots == engine.boots:
            return
        files = await self._files(engine.description)
        self.loaded = Loaded(engine.boots, files.stamps if files else {})
        try:
            await self._journal.put_loaded(self.loaded)
        except ProblemError as error:
            if error.code is not Code.DISK_FULL:
                raise
            _log.warning("remembering the base's files: %s", error)

    async def survey(self, description: EngineDescription) -> BaseRecord:
        """What there is to record of the checkpoint that an engine was loaded from."""
        files = await self._files(description)
        headers = files.headers if files else {}
        return BaseRecord(description.model.model, description.checkpoint, headers)

    async def check_headers(self, description: EngineDescription) -> None:
        """Raises base_changed if a new engine was loaded from other tensors than the history began with."""
        files = await self._files(description)
        if files is not None and self.record is not None and self.record.headers:
            self._compare_headers(files)

    async def at_hand(self, description: EngineDescription) -> bool:
        """Whether the recorded checkpoint's files can be read. Raises base_changed if they are others."""
        files = await self._files(description)
        if files is None or self.record is None or not self.record.headers:
            return False
        self._compare(files)
        return True

    async def files(self, description: EngineDescription) -> CheckpointFolder:
        """The checkpoint's files, found to be those that were recorded. Raises base_changed."""
        files = await self._files(description)
        if files is None:
            raise ProblemError(Code.BASE_CHANGED, "The base checkpoint's files can't be read any more.")
        self._compare(files)
        return files

    def _compare(self, files: CheckpointFolder) -> None:
        """Raises base_changed if these are other tensors, or were written to since an engine had them."""
        self._compare_headers(files)
        if self.loaded is not None and dict(self.loaded.stamps) != files.stamps:
            detail = (
                f"The files of {files.path} were written to since an engine was loaded from them. {REMEDY}"
            )
            raise ProblemError(Code.BASE_CHANGED, detail)

    def _compare_headers(self, files: CheckpointFolder) -> None:
        recorded = self.record.headers if self.record else {}
        found = files.headers
        other = sorted(
            name for name in recorded.keys() | found.keys() if recorded.get(name) != found.get(name)
        )
        if other:
            raise ProblemError(
                Code.BASE_CHANGED,
                f"The history began with {self.record.model if self.record else 'nothing'}; these files are "
                f"others: {', '.join(other[:5])}. {REMEDY}",
                files=other[:100],
            )

    async def _files(self, description: EngineDescription) -> CheckpointFolder | None:
        if description.checkpoint is None:
            return None
        try:
            return await asyncio.to_thread(CheckpointFolder.open, Path(description.checkpoint), _LIMITS)
        except ProblemError as error:
            # Not fatal: versions are then rebuilt on a new engine only, not in place.
            _log.warning("the base checkpoint can't be read here: %s", error)
            return None
