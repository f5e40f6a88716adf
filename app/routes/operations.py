"""Operations: work that is followed by an id."""

from fastapi import APIRouter

from app.bodies import JsonRoute
from app.openapi import problems
from app.service import ServiceDep
from schemas import operations as wire
from schemas.problems import Code

router = APIRouter(prefix="/v1/operations", tags=["operations"], route_class=JsonRoute)


@router.get("/{id}", response_model=wire.Operation, responses=problems(Code.UNKNOWN_OPERATION))
async def get_operation(id: str, service: ServiceDep) -> wire.Operation:
    """Whether it still runs, its receipt once it is done, and why it failed if it did."""
    return service.operations.get(id)
