"""The way of one upload: refused early, received, checked, put into a transaction."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.arrivals import Arrival
from app.idempotency import key_of, ticket_of
from app.link import Engine
from app.logs import bound, event
from app.operations import Asker
from app.preconditions import Precondition, check_base, etag
from app.records import Ticket
from app.service import Service
from app.transactions import IDLE, Accepted, Transaction
from loaders.catalogue import Catalogue
from loaders.refusal import fixed, refuse_any
from loaders.staged import StagedFile
from loaders.upload import CheckedUpload, check_batch, check_expert
from schemas.problems import Code
from schemas.transactions import State, TransactionOptions, Upload, UploadKind

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExpertBody:
    """A body that must be one expert."""

    layer: int
    expert: int
    partial: bool

    def check_place(self, catalogue: Catalogue) -> None:
        """Raises unknown_expert, and tensor_unsupported if whatever the body is it has to be refused."""
        slots = catalogue.experts(self.layer, self.expert).slots
        faults = [found for slot in slots for found in fixed(slot.upload.name, slot.place.tensor)]
        if not self.partial or len(faults) == len(slots):
            refuse_any(Code.TENSOR_UNSUPPORTED, faults)

    def check(self, file: StagedFile, engine: Engine, allow_nonfinite: bool) -> CheckedUpload:
        """Blocking; raises what `check_expert` does."""
        return check_expert(
            file,
            engine.catalogue,
            self.layer,
            self.expert,
            self.partial,
            allow_nonfinite,
            engine.served.files,
        )

    @property
    def place(self) -> tuple[int | None, int | None]:
        """Layer and expert."""
        return self.layer, self.expert


@dataclass(frozen=True)
class BatchBody:
    """A body that is a patch batch or a plain file."""

    def check_place(self, catalogue: Catalogue) -> None:
        """Its names stand in the body."""

    def check(self, file: StagedFile, engine: Engine, allow_nonfinite: bool) -> CheckedUpload:
        """Blocking; raises what `check_batch` does."""
        return check_batch(file, engine.catalogue, allow_nonfinite, engine.served.files)

    @property
    def place(self) -> tuple[None, None]:
        """None: it can be about any tensors."""
        return None, None


Body = ExpertBody | BatchBody


class Intake:
    """One upload request. No lock is held while its body arrives."""

    def __init__(self, service: Service, request: Request, body: Body) -> None:
        self._service = service
        self._request = request
        self._body = body
        self._transaction: str | None = None
        """The one that was asked for."""

    async def into(self, id: str) -> Response:
        """Stage the body in transaction `id`."""
        self._transaction = id

        def refuse_early() -> None:
            self._service.transactions.get(id).require(IDLE)

        async def use(
            file: StagedFile, stack: AsyncExitStack, ticket: Ticket | None, arrival: Arrival
        ) -> Response:
            transaction = self._service.transactions.get(id)
            with bound(transaction=transaction.id):
                upload = await self._add(transaction, file, stack, arrival)
            return JSONResponse(upload.model_dump(mode="json"))

        return await self._run(refuse_early, use)

    async def at_once(self, options: TransactionOptions, expected: Precondition) -> Response:
        """Stage the body in a transaction of its own and commit that."""
        service = self._service

        def refuse_early() -> None:
            service.link.require_reachable()
            current = service.ledger.current.version
            service.changes.require_idle()
            service.transactions.check(options)
            expected.check(current)
            check_base(options.base_version, current)

        async def use(
            file: StagedFile, stack: AsyncExitStack, ticket: Ticket | None, arrival: Arrival
        ) -> Response:
            transaction = await service.transactions.open(options)
            try:
                with bound(transaction=transaction.id):
                    await self._add(transaction, file, stack, arrival)
                receipt = await service.changes.commit(transaction, expected, Asker(ticket))
            finally:
                if transaction.state in IDLE:
                    await service.changes.end(transaction, State.ABORTED)
            return JSONResponse(receipt.model_dump(mode="json"), headers={"etag": etag(receipt.version)})

        return await self._run(refuse_early, use)

    async def _run(
        self,
        refuse_early: Callable[[], None],
        use: Callable[[StagedFile, AsyncExitStack, Ticket | None, Arrival], Awaitable[Response]],
    ) -> Response:
        """Receive the body and use it, unless the same request has been answered before."""
        service, request = self._service, self._request
        key = key_of(request)
        if not service.replies.known(key):  # else the answer is known and the state of things does not matter
            service.link.require_known()
            refuse_early()
            self._body.check_place(service.link.require().catalogue)
        nbytes = service.staging.check(request)
        arrival = Arrival(service.feed, self._transaction, self._body.place, nbytes)
        with arrival.judged():
            file = await service.staging.receive(request, arrival.received)

        async def once() -> Response:
            async with AsyncExitStack() as stack:
                stack.push_async_callback(service.staging.discard, [file])
                with arrival.judged():
                    ticket = ticket_of(request, file.blake3)
                    answer = await service.replies.once(ticket, lambda: use(file, stack, ticket, arrival))
                arrival.answered(answer, self._transaction)
                return answer

        return await service.tasks.finish(once())

    async def _add(
        self, transaction: Transaction, file: StagedFile, stack: AsyncExitStack, arrival: Arrival
    ) -> Upload:
        """Check the body and give it to the transaction, which then owns the file."""
        service = self._service
        engine = service.link.require()
        started = time.perf_counter()
        checked = await asyncio.to_thread(self._body.check, file, engine, transaction.options.allow_nonfinite)
        accepted = self._accepted(file, checked, (time.perf_counter() - started) * 1000)
        voided = transaction.prepared
        upload, replaced = transaction.add(accepted)
        stack.pop_all()
        arrival.accepted(transaction.id)
        service.metrics.uploaded(checked.kind, file.nbytes, checked.density)
        event(
            _log, logging.INFO, "upload accepted", kind=checked.kind, nbytes=file.nbytes, blake3=file.blake3
        )
        await service.staging.discard(replaced)
        await service.changes.void(voided)
        return upload

    def _accepted(self, file: StagedFile, checked: CheckedUpload, validate_ms: float) -> Accepted:
        layer, expert = self._body.place
        upload = Upload(
            number=0,
            kind=UploadKind(checked.kind),
            layer=layer,
            expert=expert,
            blake3=file.blake3,
            nbytes=file.nbytes,
            tensors=checked.tensors,
            elements=checked.elements,
        )
        return Accepted(upload, file, checked.upload, validate_ms)
