"""Transactions: open, look at, prepare, commit, abort."""

from typing import Annotated

from fastapi import APIRouter, Header, Response

from app.bodies import JsonRoute, TicketDep
from app.openapi import COMMIT, accepted, json_parameters, problems, tagged
from app.operations import Asker
from app.preconditions import check_base, etag, parse_if_match
from app.routes.names import TransactionId
from app.routes.operations import Prefer, followed, wants_async
from app.service import ServiceDep
from app.transactions import IDLE, preparation
from schemas import transactions as wire
from schemas.operations import OperationKind
from schemas.problems import Code
from schemas.transactions import Nothing, State, TransactionOptions

router = APIRouter(prefix="/v1/transactions", tags=["transactions"], route_class=JsonRoute)

IfMatch = Annotated[str | None, Header(include_in_schema=False)]


@router.post(
    "",
    status_code=201,
    response_model=wire.Transaction,
    openapi_extra=json_parameters(),
    responses=tagged("The open transaction.", location=True)
    | problems(Code.VERSION_MOVED, Code.STAGED_BUDGET, Code.STATE_UNKNOWN),
)
async def open_transaction(
    service: ServiceDep, response: Response, options: TransactionOptions | None = None
) -> wire.Transaction:
    """Open a transaction to upload into."""
    service.link.require_known()
    options = options or TransactionOptions()
    check_base(options.base_version, service.ledger.current.version)
    transaction = await service.transactions.open(options)
    response.headers["location"] = f"/v1/transactions/{transaction.id}"
    return transaction.view()


@router.get("", response_model=wire.TransactionList)
async def list_transactions(service: ServiceDep) -> wire.TransactionList:
    """All that are open, and the latest that have ended; oldest first."""
    return wire.TransactionList(transactions=tuple(one.view() for one in service.transactions.all()))


@router.get("/{id}", response_model=wire.Transaction, responses=problems(Code.UNKNOWN_TRANSACTION))
async def get_transaction(id: TransactionId, service: ServiceDep) -> wire.Transaction:
    """State, uploads in the order of application, and the receipt once there is one."""
    return service.transactions.get(id).view()


@router.delete(
    "/{id}",
    response_model=wire.Transaction,
    responses=problems(Code.UNKNOWN_TRANSACTION, Code.TRANSACTION_STATE, Code.TRANSACTION_EXPIRED),
)
async def abort_transaction(id: TransactionId, service: ServiceDep) -> wire.Transaction:
    """Abort: what was staged is dropped, here and on the engine. Aborting again does no harm."""
    transaction = service.transactions.get(id)
    if transaction.state is not State.ABORTED:
        transaction.require(IDLE)
        await service.changes.end(transaction, State.ABORTED)
    return transaction.view()


@router.post(
    "/{id}/prepare",
    response_model=wire.Preparation,
    openapi_extra=json_parameters(),
    responses=problems(Code.UNKNOWN_TRANSACTION, *COMMIT),
)
async def prepare_transaction(
    id: TransactionId, service: ServiceDep, nothing: Nothing | None = None
) -> wire.Preparation:
    """Phase one on every rank while the engine serves; kept until commit, abort or an upload."""
    return preparation(await service.changes.prepare(service.transactions.get(id)))


@router.post(
    "/{id}/commit",
    response_model=wire.Receipt,
    openapi_extra=json_parameters(if_match=True, prefer=True),
    responses=tagged("What was done.") | accepted() | problems(Code.UNKNOWN_TRANSACTION, *COMMIT),
)
async def commit_transaction(
    id: TransactionId,
    service: ServiceDep,
    response: Response,
    ticket: TicketDep,
    nothing: Nothing | None = None,
    if_match: IfMatch = None,
    prefer: Prefer = None,
) -> wire.Receipt | Response:
    """All ranks or none. The receipt stays readable under the transaction."""
    transaction, expected = service.transactions.get(id), parse_if_match(if_match)

    async def commit(asker: Asker) -> wire.Receipt:
        return await service.changes.commit(transaction, expected, asker)

    if wants_async(prefer):
        transaction.require(IDLE)
        service.changes.require_idle()
        return followed(await service.operations.start(OperationKind.COMMIT, id, commit))
    receipt = await commit(Asker(ticket))
    response.headers["etag"] = etag(receipt.version)
    return receipt
