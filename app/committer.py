"""From prepared work to a version: what is intended is written down, asked of the engine, and recorded."""

import logging
from collections.abc import Sequence

from app import outcome
from app.books import Books
from app.digests import VersionDigests
from app.link import EngineLink
from app.logs import event
from app.metrics import Metrics
from app.operations import Asker
from app.receipts import Change
from app.records import Intent
from app.transactions import Prepared
from loaders.staged import StagedFile
from schemas.bridge import CommitResult, StagedUpload
from schemas.problems import Code, ProblemError
from schemas.transactions import FlightOptions, Receipt, State

_log = logging.getLogger(__name__)


class Committer:
    """Carries out one commit at a time; whoever asks sees to it that there is only one."""

    def __init__(self, link: EngineLink, books: Books, digests: VersionDigests, metrics: Metrics) -> None:
        self._link = link
        self._books = books
        self._digests = digests
        self._metrics = metrics

    async def intend(
        self,
        change: Change,
        prepared: Prepared,
        flight: FlightOptions,
        asker: Asker,
        uploads: tuple[StagedUpload, ...] = (),
        files: Sequence[StagedFile] = (),
    ) -> Intent:
        """What is about to be done, written down with the `files` that it will need. Raises disk_full."""
        ticket = asker.ticket
        intent = Intent(
            change=change,
            key=prepared.key,
            prepared=prepared.result,
            boots=dict(self._link.require().boots),
            flight=FlightOptions(in_flight=flight.in_flight, drain_timeout_s=flight.drain_timeout_s),
            uploads=uploads,
            ticket=(ticket.key, ticket.fingerprint) if ticket else None,
            operation=asker.operation,
        )
        return await self._books.intend(intent, files)

    async def commit(self, intent: Intent, prepared: Prepared) -> Receipt:
        """A rollback or reload: no transaction has to know how it ends."""
        try:
            result = await self.carry_out(intent, prepared)
        except ProblemError as error:
            if error.code is not Code.STATE_UNKNOWN:
                await self.note_failure(intent, State.FAILED, error)
            raise
        return await self.record(intent, result)

    async def carry_out(self, intent: Intent, prepared: Prepared) -> CommitResult:
        """Phase two on every rank. Raises what `outcome.commit` does."""
        boots = self._link.require().boots
        try:
            return await outcome.commit(self._link, boots, prepared, intent.change.version, intent.flight)
        except ProblemError as error:
            if error.code is Code.STATE_UNKNOWN:
                self._link.mark_unknown(error.detail, boots)
            else:
                await outcome.drop(self._link, prepared.key)
            raise
        except BaseException:
            # Cut short by a shutdown or a bug: nobody saw the outcome, so nobody may build on it.
            self._link.mark_unknown("A commit was cut short; restart the engine.", boots)
            raise

    async def record(self, intent: Intent, result: CommitResult) -> Receipt:
        """Write down what was done; if that can't be, nothing is built on it before it can."""
        try:
            receipt = await self._books.done(intent, result)
        except ProblemError:
            self._link.reconsider()
            raise
        self._link.moved(receipt.version)
        self._digests.want()
        self._metrics.changed(receipt)
        event(
            _log,
            logging.INFO,
            "version",
            version=receipt.version,
            tensors=receipt.tensors,
            nbytes=receipt.nbytes.written,
            timing=receipt.timing.model_dump(),
        )
        return receipt

    async def note_failure(self, intent: Intent, state: State, error: ProblemError) -> None:
        """Write down that nothing was done; what went wrong matters more than if that can't be now."""
        try:
            await self._books.failed(intent, state, error)
        except ProblemError:
            self._link.reconsider()
