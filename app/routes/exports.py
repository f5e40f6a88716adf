"""Versions as checkpoint folders: begun, followed, cancelled."""

from typing import Annotated

from fastapi import APIRouter, Path, Response

from app.bodies import JsonRoute
from app.openapi import json_parameters, problems, tagged
from app.routes.names import OperationId
from app.service import ServiceDep
from schemas import operations as wire
from schemas.base import Version
from schemas.problems import Code

router = APIRouter(prefix="/v1", tags=["operations"], route_class=JsonRoute)


@router.post(
    "/versions/{n}/export",
    status_code=202,
    response_model=wire.Operation,
    openapi_extra=json_parameters(),
    responses=tagged("The operation to follow.", location=True, status=202)
    | problems(
        Code.UNKNOWN_VERSION,
        Code.VERSION_NOT_HELD,
        Code.PATH_NOT_ALLOWED,
        Code.PATH_TAKEN,
        Code.BUSY,
        Code.NOT_SUPPORTED,
        Code.BAD_CHECKPOINT,
        Code.CHECKPOINT_MISMATCH,
        Code.DISK_FULL,
        Code.ENGINE_UNAVAILABLE,
        Code.STATE_UNKNOWN,
    ),
)
async def export_version(
    n: Annotated[Version, Path(description="A version, in decimal.")],
    request: wire.ExportRequest,
    service: ServiceDep,
    response: Response,
) -> wire.Operation:
    """Write the weights that the engine runs as a plain checkpoint folder, sharded like the base."""
    operation = await service.exports.start(n, request.path)
    response.headers["location"] = f"/v1/operations/{operation.id}"
    return operation


@router.delete(
    "/operations/{id}",
    response_model=wire.Operation,
    responses=problems(Code.UNKNOWN_OPERATION, Code.OPERATION_STATE),
)
async def cancel_operation(id: OperationId, service: ServiceDep) -> wire.Operation:
    """Cancel an export and wait until nothing is left of it. One that has ended stays as it is."""
    return await service.exports.cancel(id)
