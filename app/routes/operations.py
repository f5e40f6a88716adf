"""Operations: work that are followed by an id."""

import re
from typing import Annotated

from fastapi import APIRouter, Header, Response
from starlette.responses import JSONResponse

from app.bodies import JsonRoute
from app.openapi import problems
from app.routes.names import OperationId
from app.service import ServiceDep
from schemas import operations as wire
from schemas.problems import Code

router = APIRouter(prefix="/v1/operations", tags=["operations"], route_class=JsonRoute)

Prefer = Annotated[str | None, Header(include_in_schema=False)]
_RESPOND_ASYNC = re.compile(r"(^|[,;])\s*respond-async\s*($|[,;=])", re.IGNORECASE)


@router.get("/{id}", response_model=wire.Operation, responses=problems(Code.UNKNOWN_OPERATION))
async def get_operation(id: OperationId, service: ServiceDep) -> wire.Operation:
    """Whether it still runs, its receipt once it is done, and why it failed if it did."""
    return service.operations.get(id)


def wants_async(prefer: str | None) -> bool:
    """Whether a Prefer header asks for 202 instead of waiting (RFC 7240)."""
    return prefer is not None and _RESPOND_ASYNC.search(prefer) is not None


def followed(operation: wire.Operation) -> Response:
    """The 202 that names an operation."""
    headers = {"location": f"/v1/operations/{operation.id}", "preference-applied": "respond-async"}
    return JSONResponse(operation.model_dump(mode="json"), 202, headers)
