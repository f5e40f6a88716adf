"""The history of the weights, and the way back."""

from typing import Annotated

from fastapi import APIRouter, Path, Response

from app.bodies import JsonRoute, TicketDep
from app.ledger import Ledger
from app.openapi import COMMIT, accepted, json_parameters, problems, tagged
from app.operations import Asker
from app.preconditions import etag, parse_if_match
from app.routes.operations import Prefer, followed, wants_async
from app.routes.transactions import IfMatch
from app.service import ServiceDep
from schemas import versions as wire
from schemas.base import Version
from schemas.operations import OperationKind
from schemas.problems import Code, ProblemError
from schemas.transactions import Receipt

router = APIRouter(prefix="/v1", tags=["versions"], route_class=JsonRoute)


@router.get("/versions", response_model=wire.VersionList)
async def list_versions(service: ServiceDep) -> wire.VersionList:
    """The history, oldest first, and what of it can be rolled back to."""
    ledger = service.ledger
    entries = ledger.entries(ledger.records())
    return wire.VersionList(ledger=ledger.id, current=ledger.current.version, versions=entries)


@router.get(
    "/versions/current",
    response_model=wire.CurrentVersion,
    responses=tagged("The version that the engine serves."),
)
async def current_version(service: ServiceDep, response: Response) -> wire.CurrentVersion:
    """The current version; its ETag is what If-Match takes."""
    ledger = service.ledger
    record = ledger.current
    response.headers["etag"] = etag(record.version)
    return wire.CurrentVersion(**dict(ledger.entry(record)), receipt=record.receipt, ledger=ledger.id)


@router.get("/versions/{n}", response_model=wire.VersionDetail, responses=problems(Code.UNKNOWN_VERSION))
async def get_version(
    n: Annotated[Version, Path(description="A version, in decimal.")], service: ServiceDep
) -> wire.VersionDetail:
    """One version with its receipt."""
    record = service.ledger.get(n)
    return wire.VersionDetail(**dict(service.ledger.entry(record)), receipt=record.receipt)


@router.post(
    "/rollback",
    response_model=Receipt,
    openapi_extra=json_parameters(if_match=True, prefer=True),
    responses=tagged("What was done.") | accepted() | problems(*COMMIT),
)
async def rollback(
    request: wire.RollbackRequest,
    service: ServiceDep,
    response: Response,
    ticket: TicketDep,
    if_match: IfMatch = None,
    prefer: Prefer = None,
) -> Receipt | Response:
    """A new version with the weights of an old one, bit for bit."""
    expected = parse_if_match(if_match)
    target = request.to_version
    if target is None:
        target = _baseline_version(service.ledger, request.to_baseline or "")

    async def roll_back(asker: Asker) -> Receipt:
        return await service.changes.rollback(target, expected, request, asker)

    if wants_async(prefer):
        service.changes.require_idle()
        return followed(await service.operations.start(OperationKind.ROLLBACK, None, roll_back))
    receipt = await roll_back(Asker(ticket))
    response.headers["etag"] = etag(receipt.version)
    return receipt


def _baseline_version(ledger: Ledger, name: str) -> int:
    """A name in a body is no id in a path: a version that can't be gone back to, not a 404."""
    try:
        return ledger.baseline(name).version
    except ProblemError as error:
        raise ProblemError(Code.VERSION_NOT_HELD, error.detail) from error
