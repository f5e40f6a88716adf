"""The folder of staged uploads: bodies come in, stay within a budget, and go again."""

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path

from starlette.requests import Request

from app.announced import check_announced
from app.budget import StagedBudget
from app.receive import ReceiveLimits, Report, receive_body, unheard
from app.settings import Settings
from loaders.header import HeaderLimits
from loaders.staged import StagedFile

_log = logging.getLogger(__name__)


class Staging:
    """Receives uploads into `folder` and deletes them; making it touches no disk."""

    def __init__(self, settings: Settings) -> None:
        self.folder: Path = settings.staged_dir
        self.budget = StagedBudget(settings.staged_bytes)
        self._limits = ReceiveLimits(
            body_nbytes=settings.body_bytes,
            idle_s=settings.body_idle_s,
            total_s=settings.body_total_s,
            header=HeaderLimits(nbytes=settings.header_bytes),
        )

    def check(self, request: Request) -> int | None:
        """Refuse what can be refused by the request's headers alone; how many bytes they announce."""
        return check_announced(request.headers, self._limits.body_nbytes).nbytes

    async def receive(self, request: Request, report: Report = unheard) -> StagedFile:
        """The body as a file, which the caller discards in the end. Raises what `receive_body` does."""
        return await receive_body(request, self.folder, self._limits, self.budget, report)

    async def discard(self, files: Iterable[StagedFile]) -> None:
        """Delete files and free their room, without blocking the event loop.

        A file that can't be deleted is logged and keeps its room: what was done with it
        is done, and the next start clears the folder.
        """
        unwanted = list(files)
        if unwanted:
            self.budget.release(await asyncio.to_thread(_unlink, unwanted))


def _unlink(files: Iterable[StagedFile]) -> int:
    """Bytes of the files that are gone."""
    nbytes = 0
    for file in files:
        try:
            file.unlink()
        except OSError:
            _log.exception("deleting %s", file.path)
        else:
            nbytes += file.nbytes
    return nbytes
