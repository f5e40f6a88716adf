"""Uploads: experts and patch batches, into a transaction or committed in the same request."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.bodies import UploadRoute
from app.intake import BatchBody, ExpertBody, Intake
from app.openapi import COMMIT, problems, tagged, upload_body
from app.preconditions import parse_if_match
from app.routes.names import Expert, Layer, TransactionId
from app.routes.transactions import IfMatch
from app.service import ServiceDep
from schemas.problems import Code
from schemas.transactions import ExpertOptions, OneShotExpertOptions, Receipt, TransactionOptions, Upload

router = APIRouter(prefix="/v1", tags=["uploads"], route_class=UploadRoute)

_INTO = (Code.STATE_UNKNOWN, Code.UNKNOWN_TRANSACTION, Code.TRANSACTION_STATE, Code.TRANSACTION_EXPIRED)


@router.put(
    "/transactions/{id}/experts/{layer}/{expert}",
    response_model=Upload,
    openapi_extra=upload_body(),
    responses=problems(*_INTO, Code.UNKNOWN_EXPERT),
)
async def put_expert(
    id: TransactionId,
    layer: Layer,
    expert: Expert,
    request: Request,
    service: ServiceDep,
    options: Annotated[ExpertOptions, Query()],
) -> Response:
    """Stage one expert. A second upload of it replaces the first and goes last in the order."""
    return await Intake(service, request, ExpertBody(layer, expert, options.partial)).into(id)


@router.post(
    "/transactions/{id}/patches",
    response_model=Upload,
    openapi_extra=upload_body(),
    responses=problems(*_INTO),
)
async def post_patches(id: TransactionId, request: Request, service: ServiceDep) -> Response:
    """Stage a patch batch, or a plain safetensors file whose tensors replace those of the same name."""
    return await Intake(service, request, BatchBody()).into(id)


@router.put(
    "/experts/{layer}/{expert}",
    response_model=Receipt,
    openapi_extra=upload_body(if_match=True),
    responses=tagged("What was done.") | problems(*COMMIT, Code.UNKNOWN_EXPERT),
)
async def put_expert_now(
    layer: Layer,
    expert: Expert,
    request: Request,
    service: ServiceDep,
    options: Annotated[OneShotExpertOptions, Query()],
    if_match: IfMatch = None,
) -> Response:
    """Upload one expert and commit it, in one request."""
    intake = Intake(service, request, ExpertBody(layer, expert, options.partial))
    plain = TransactionOptions.model_validate(options.model_dump(exclude={"partial"}))
    return await intake.at_once(plain, parse_if_match(if_match))


@router.post(
    "/patches",
    response_model=Receipt,
    openapi_extra=upload_body(if_match=True),
    responses=tagged("What was done.") | problems(*COMMIT),
)
async def post_patches_now(
    request: Request,
    service: ServiceDep,
    options: Annotated[TransactionOptions, Query()],
    if_match: IfMatch = None,
) -> Response:
    """Upload a patch batch or a plain safetensors file and commit it, in one request."""
    return await Intake(service, request, BatchBody()).at_once(options, parse_if_match(if_match))
