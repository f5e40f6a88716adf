"""Names for versions that stay within reach."""

from fastapi import APIRouter, Response

from app.bodies import JsonRoute
from app.ledger import BaselineRecord
from app.openapi import UNREADY, json_parameters, problems
from app.routes import names
from app.service import ServiceDep
from schemas.problems import Code
from schemas.versions import Baseline, BaselineList, BaselineRequest

router = APIRouter(prefix="/v1/baselines", tags=["baselines"], route_class=JsonRoute)


@router.get("", response_model=BaselineList)
async def list_baselines(service: ServiceDep) -> BaselineList:
    """All baselines by name."""
    return BaselineList(baselines=tuple(_view(record) for record in service.ledger.baselines()))


@router.get("/{name}", response_model=Baseline, responses=problems(Code.UNKNOWN_BASELINE))
async def get_baseline(name: names.Baseline, service: ServiceDep) -> Baseline:
    """The version that a name stands for."""
    return _view(service.ledger.baseline(name))


@router.put(
    "/{name}",
    response_model=Baseline,
    openapi_extra=json_parameters(),
    responses=problems(Code.VERSION_NOT_HELD, Code.UNDO_BUDGET, Code.BLOB_BUDGET, Code.DISK_FULL, *UNREADY),
)
async def put_baseline(
    name: names.Baseline, service: ServiceDep, request: BaselineRequest | None = None
) -> Baseline:
    """Name a version, else the current one: what rolling back to it needs is kept until the name goes."""
    service.link.require_writable()  # before the engine was met, nobody knows the current version
    asked = request.version if request else None
    version = service.ledger.current.version if asked is None else asked
    return _view(await service.baselines.put(name, version))


@router.delete("/{name}", status_code=204, responses=problems(Code.UNKNOWN_BASELINE))
async def delete_baseline(name: names.Baseline, service: ServiceDep) -> Response:
    """Let the name go; its version stays in the history."""
    await service.baselines.delete(name)
    return Response(status_code=204)


def _view(record: BaselineRecord) -> Baseline:
    return Baseline(name=record.name, version=record.version, created_at=record.created_at)
