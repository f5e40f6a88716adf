"""All weights anew from disk."""

from fastapi import APIRouter, Response

from app.bodies import JsonRoute
from app.openapi import COMMIT, json_parameters, problems, tagged
from app.preconditions import etag, parse_if_match
from app.routes.transactions import IfMatch
from app.service import ServiceDep
from schemas.problems import Code
from schemas.transactions import Receipt
from schemas.versions import ReloadRequest

router = APIRouter(prefix="/v1", tags=["versions"], route_class=JsonRoute)


@router.post(
    "/reload",
    response_model=Receipt,
    openapi_extra=json_parameters(if_match=True),
    responses=tagged("What was done.")
    | problems(*COMMIT, Code.BAD_CHECKPOINT, Code.CHECKPOINT_MISMATCH, Code.PATH_NOT_ALLOWED),
)
async def reload(
    service: ServiceDep,
    response: Response,
    request: ReloadRequest | None = None,
    if_match: IfMatch = None,
) -> Receipt:
    """A new version with the weights of a checkpoint folder: the current one read again, or another."""
    receipt = await service.reloads.reload(request or ReloadRequest(), parse_if_match(if_match))
    response.headers["etag"] = etag(receipt.version)
    return receipt
