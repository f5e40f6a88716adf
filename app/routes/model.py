"""What the engine serves and what of it can be updated."""

from typing import Annotated

from fastapi import APIRouter, Query

from app.bodies import JsonRoute
from app.openapi import problems
from app.service import ServiceDep
from app.touched import expert_map
from schemas.problems import Code
from schemas.status import ExpertMap, Model, TensorPage

router = APIRouter(prefix="/v1/model", tags=["model"], route_class=JsonRoute)

_ABSENT = problems(Code.ENGINE_UNAVAILABLE)


@router.get("", response_model=Model, responses=_ABSENT)
async def model(service: ServiceDep) -> Model:
    """Architecture, size, and the names of an expert's tensors in uploads."""
    engine = service.link.require()
    layers = engine.catalogue.expert_layers
    slots = engine.catalogue.experts(layers[0], 0).slots if layers else ()
    info = engine.description.model.model_dump()
    return Model(**info, expert_layers=layers, expert_tensors=tuple(slot.upload for slot in slots))


@router.get("/experts", response_model=ExpertMap, responses=_ABSENT)
async def expert_versions(service: ServiceDep) -> ExpertMap:
    """The version that last wrote to each expert, layer by layer, of the weights that are current."""
    catalogue = service.link.require().catalogue
    version = service.ledger.current.version
    return expert_map(version, service.ledger.touched(version), catalogue)


@router.get("/tensors", response_model=TensorPage, responses=_ABSENT)
async def tensors(
    service: ServiceDep,
    prefix: Annotated[str, Query(description="Only names that start like this.")] = "",
    after: Annotated[str, Query(description="Continue after this name.")] = "",
    limit: Annotated[int, Query(ge=1, le=1000, description="How many at most.")] = 200,
) -> TensorPage:
    """Checkpoint tensors by name, with dtype, shape and treatment."""
    found = service.link.require().catalogue.tensors(prefix, after)
    page = tuple(found[:limit])
    return TensorPage(tensors=page, next=page[-1].name if len(found) > limit else None)
