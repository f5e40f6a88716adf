"""All weights anew from disk."""

from fastapi import APIRouter, Response

from app.bodies import JsonRoute, TicketDep
from app.openapi import COMMIT, accepted, json_parameters, problems, tagged
from app.operations import Asker
from app.preconditions import etag, parse_if_match
from app.routes.operations import Prefer, followed, wants_async
from app.routes.transactions import IfMatch
from app.service import ServiceDep
from schemas.operations import OperationKind
from schemas.problems import Code
from schemas.transactions import Receipt
from schemas.versions import ReloadRequest

router = APIRouter(prefix="/v1", tags=["versions"], route_class=JsonRoute)


@router.post(
    "/reload",
    response_model=Receipt,
    openapi_extra=json_parameters(if_match=True, prefer=True),
    responses=tagged("What was done.")
    | accepted()
    | problems(*COMMIT, Code.BAD_CHECKPOINT, Code.CHECKPOINT_MISMATCH, Code.PATH_NOT_ALLOWED),
)
async def reload(
    service: ServiceDep,
    response: Response,
    ticket: TicketDep,
    request: ReloadRequest | None = None,
    if_match: IfMatch = None,
    prefer: Prefer = None,
) -> Receipt | Response:
    """A new version with the weights of a checkpoint folder: the current one read again, or another."""
    wanted, expected = request or ReloadRequest(), parse_if_match(if_match)

    async def reload_weights(asker: Asker) -> Receipt:
        return await service.reloads.reload(wanted, expected, asker)

    if wants_async(prefer):
        service.changes.require_idle()
        return followed(await service.operations.start(OperationKind.RELOAD, None, reload_weights))
    receipt = await reload_weights(Asker(ticket))
    response.headers["etag"] = etag(receipt.version)
    return receipt
