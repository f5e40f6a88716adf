"""Weights as the engine has them, in checkpoint coordinates; and digests of its memory."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, BinaryIO

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from app.openapi import SAFETENSORS, binary_answer, problems
from app.preconditions import etag
from app.problems import respond
from app.routes.names import Expert, Layer, Tensor
from app.service import Service, ServiceDep
from schemas.bridge import DigestsResult, ReadTensor
from schemas.problems import Code, ProblemError

router = APIRouter(prefix="/v1", tags=["weights"])

_CHUNK = 1024 * 1024
_READ = (Code.ENGINE_UNAVAILABLE, Code.BUSY, Code.TENSOR_UNSUPPORTED, Code.DISK_FULL)


@router.get(
    "/experts/{layer}/{expert}",
    response_class=Response,
    responses=binary_answer("The expert's tensors under their short names.")
    | problems(Code.UNKNOWN_EXPERT, *_READ),
)
async def read_expert(layer: Layer, expert: Expert, service: ServiceDep) -> Response:
    """One expert as an upload would have it, all of one version."""
    slots = service.link.require().catalogue.experts(layer, expert).slots
    wanted = [
        ReadTensor(
            name=slot.upload.name,
            tensor=slot.place.tensor.name,
            expert=slot.place.expert,
            loaded=slot.place.tensor.loaded,
        )
        for slot in slots
    ]
    return await _read(service, wanted, lossless=all(slot.place.tensor.lossless for slot in slots))


@router.get(
    "/tensors/{name:path}",
    response_class=Response,
    responses=binary_answer("The tensor under its checkpoint name.")
    | problems(Code.UNKNOWN_TENSOR, *_READ, statuses={Code.UNKNOWN_TENSOR: 404}),
)
async def read_tensor(name: Tensor, service: ServiceDep) -> Response:
    """One checkpoint tensor."""
    try:
        tensor = service.link.require().catalogue.resolve(name)
    except ProblemError as error:
        # In a path a name is an id, so it is "not found" rather than wrong content.
        return respond(error, status=404 if error.code is Code.UNKNOWN_TENSOR else None)
    wanted = [ReadTensor(name=tensor.name, tensor=tensor.name, loaded=tensor.loaded)]
    return await _read(service, wanted, lossless=tensor.lossless)


@router.get("/digests", response_model=DigestsResult, responses=problems(Code.ENGINE_UNAVAILABLE, Code.BUSY))
async def read_digests(
    service: ServiceDep,
    prefix: Annotated[str, Query(description="Only runtime tensors whose names start like this.")] = "",
) -> DigestsResult:
    """Digests of runtime tensors per rank; they depend on the weights alone."""
    service.link.require()
    return await service.client.digests(prefix)


async def _read(service: Service, tensors: Sequence[ReadTensor], *, lossless: bool) -> Response:
    """All weights are read where the kernels read them; what was cast on its way there may have lost bits."""
    origin = {"graft.read_from": "engine", "graft.lossless": str(lossless).lower()}
    path = service.settings.read_dir / f"{secrets.token_hex(8)}.safetensors"
    try:
        result = await service.client.read(path, tensors, origin)
        file = await asyncio.to_thread(path.open, "rb")
    finally:
        # The open file outlives its name, so nothing is left however the answer ends.
        await asyncio.to_thread(path.unlink, missing_ok=True)
    headers = {"etag": etag(result.version), "content-length": str(result.nbytes)}
    return StreamingResponse(_chunks(file), media_type=SAFETENSORS, headers=headers)


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while chunk := await asyncio.to_thread(file.read, _CHUNK):
            yield chunk
