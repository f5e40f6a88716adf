"""Whether the process lives, and whether the engine behind it serves the right weights."""

from fastapi import APIRouter, Response

from app.openapi import UNREADY, problems
from app.problems import respond
from app.service import ServiceDep
from schemas.problems import Code, ProblemError
from schemas.status import Alive, Ready

router = APIRouter(tags=["health"])

_UNREADY = {Code.STATE_UNKNOWN: 503}


@router.get("/health/live", response_model=Alive, openapi_extra={"security": []})
async def live() -> Alive:
    """200 once the process runs, whatever the engine does. Needs no token."""
    return Alive()


@router.get(
    "/health/ready",
    response_model=Ready,
    responses=problems(*UNREADY, statuses=_UNREADY),
)
async def ready(service: ServiceDep) -> Ready | Response:
    """200 only if the engine answered in time and runs the current version."""
    try:
        return Ready(version=await service.ready_version())
    except ProblemError as error:
        return respond(error, status=503)
