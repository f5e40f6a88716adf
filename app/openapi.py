"""What FastAPI can't say by itself in /openapi.json: binary bodies, headers, problems."""

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from app import examples
from app.bodies import JsonRoute, UploadRoute
from app.headers import (
    CONTENT_DIGEST,
    ETAG,
    IDEMPOTENCY_KEY,
    IF_MATCH,
    LAST_EVENT_ID,
    LOCATION,
    PREFER,
    RETRY_AFTER,
)
from app.problems import MEDIA_TYPE
from schemas.events import Event
from schemas.operations import Operation
from schemas.problems import STATUS, Code, Problem

Json = dict[str, Any]

UPLOAD_TYPES = ("application/octet-stream", "application/vnd.safetensors")
SAFETENSORS = "application/vnd.safetensors"
EVENT_STREAM = "text/event-stream"

TAGS = {
    "health": "For machines that start, stop and watch the service.",
    "status": "How engine and service stand.",
    "model": "What the engine serves, and what of it can be updated.",
    "transactions": "Several uploads that are applied together or not at all.",
    "uploads": "Weights as safetensors files: experts and batches of patches.",
    "versions": "The history of the weights, and the way back.",
    "baselines": "Names for versions that stay within reach.",
    "operations": "Work that is followed by an id instead of waited for.",
    "weights": "Weights as the engine has them.",
}
"""What operations are sorted by."""

_EVERYWHERE = (Code.UNAUTHORIZED, Code.BAD_HOST, Code.BAD_ORIGIN, Code.INTERNAL)
_JSON_BODY = (
    Code.BAD_REQUEST,
    Code.BAD_JSON,
    Code.BAD_VALUE,
    Code.BODY_TOO_LARGE,
    Code.BODY_TIMEOUT,
    Code.CONTENT_TYPE,
    Code.CONTENT_ENCODING,
    Code.CLIENT_GONE,
    Code.IN_PROGRESS,
    Code.IDEMPOTENCY_MISMATCH,
)
_UPLOAD_BODY = (
    Code.BAD_REQUEST,
    Code.BAD_VALUE,
    Code.BODY_EMPTY,
    Code.BODY_TOO_LARGE,
    Code.BODY_LENGTH,
    Code.BODY_DIGEST,
    Code.BODY_TIMEOUT,
    Code.CONTENT_TYPE,
    Code.CONTENT_ENCODING,
    Code.HEADER_LENGTH,
    Code.HEADER_JSON,
    Code.HEADER_ENTRY,
    Code.HEADER_DUPLICATE,
    Code.HEADER_METADATA,
    Code.HEADER_OFFSETS,
    Code.UNKNOWN_DTYPE,
    Code.UNKNOWN_TENSOR,
    Code.MISSING_TENSOR,
    Code.DUPLICATE_TENSOR,
    Code.WRONG_SHAPE,
    Code.WRONG_DTYPE,
    Code.BAD_PATCH,
    Code.BAD_INDEX,
    Code.NONFINITE,
    Code.NOTHING_TO_APPLY,
    Code.TENSOR_UNSUPPORTED,
    Code.TIED_TENSOR,
    Code.CLIENT_GONE,
    Code.IN_PROGRESS,
    Code.IDEMPOTENCY_MISMATCH,
    Code.STAGED_BUDGET,
    Code.DISK_FULL,
    Code.ENGINE_UNAVAILABLE,
)
UNREADY = (
    Code.ENGINE_UNAVAILABLE,
    Code.RECOVERING,
    Code.STATE_UNKNOWN,
    Code.BASE_CHANGED,
    Code.LEDGER_DAMAGED,
    Code.VERSION_LOST,
)
"""Why the engine can't be changed now."""
COMMIT = (
    Code.BUSY,
    Code.TRANSACTION_STATE,
    Code.TRANSACTION_EXPIRED,
    Code.INTERRUPTED,
    Code.NOTHING_TO_APPLY,
    Code.VERSION_MOVED,
    Code.PRECONDITION_FAILED,
    Code.VERSION_NOT_HELD,
    Code.NOT_SUPPORTED,
    Code.DRAFT_MODEL,
    Code.ENGINE_ASLEEP,
    Code.DRAIN_TIMEOUT,
    Code.UNDO_BUDGET,
    Code.BLOB_BUDGET,
    Code.DISK_FULL,
    Code.ENGINE_MEMORY,
    Code.TENSOR_UNSUPPORTED,
    Code.TIED_TENSOR,
    *UNREADY,
    Code.PREPARE_FAILED,
    Code.COMMIT_UNDONE,
)
"""What a commit can end with."""


def problems(*codes: Code, statuses: dict[Code, int] | None = None) -> dict[int | str, Json]:
    """OpenAPI responses for `codes`, one per HTTP status, naming the codes that it can have."""
    by_status: dict[int, list[Code]] = {}
    for code in codes:
        status = (statuses or {}).get(code, STATUS[code][0])
        by_status.setdefault(status, []).append(code)
    return {status: _problem_response(group, status) for status, group in sorted(by_status.items())}


def json_parameters(*, if_match: bool = False, prefer: bool = False) -> Json:
    """Request headers of a route that changes state, for `openapi_extra`."""
    more = [*([IF_MATCH] if if_match else []), *([PREFER] if prefer else [])]
    return {"parameters": [IDEMPOTENCY_KEY, *more]}


def upload_body(*, if_match: bool = False) -> Json:
    """The binary body and the headers of an upload, for `openapi_extra`."""
    binary = {"schema": {"type": "string", "format": "binary"}}
    body = {
        "required": True,
        "description": "A safetensors file.",
        "content": dict.fromkeys(UPLOAD_TYPES, binary),
    }
    parameters = [*json_parameters(if_match=if_match)["parameters"], CONTENT_DIGEST]
    return {"requestBody": body, "parameters": parameters}


def tagged(description: str, *, location: bool = False, status: int = 201) -> dict[int | str, Json]:
    """A 200 that carries the version as ETag, or another `status` that carries a Location."""
    if location:
        return {status: {"description": description, "headers": {"Location": LOCATION}}}
    return {200: {"description": description, "headers": {"ETag": ETAG}}}


def accepted() -> dict[int | str, Json]:
    """A 202 that names an operation to follow, for those who prefer that."""
    description = "The operation to follow, if `Prefer: respond-async` was sent."
    return {202: {"model": Operation, "description": description, "headers": {"Location": LOCATION}}}


def binary_answer(description: str) -> dict[int | str, Json]:
    """A 200 whose body is a safetensors file of one version."""
    content = {SAFETENSORS: {"schema": {"type": "string", "format": "binary"}}}
    return {200: {"description": description, "content": content, "headers": {"ETag": ETAG}}}


def event_stream(description: str) -> dict[int | str, Json]:
    """A 200 that goes on, as events whose data is JSON; OpenAPI 3.1 has no word for the items of a stream."""
    data = {"contentMediaType": "application/json", "contentSchema": {"$ref": "#/components/schemas/Event"}}
    item = {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "event": {"type": "string"},
            "data": {"type": "string", **data},
        },
        "required": ["id", "event", "data"],
    }
    schema = {"type": "string", "contentMediaType": EVENT_STREAM, "contentSchema": item}
    content = {EVENT_STREAM: {"schema": schema, "example": examples.EVENT}}
    return {200: {"description": description, "content": content}}


def last_event() -> Json:
    """The header that a stream of events is resumed by, for `openapi_extra`."""
    return {"parameters": [LAST_EVENT_ID]}


def install(app: FastAPI) -> None:
    """Serve a schema that tells what all routes have in common, too."""

    def openapi() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend it


def _schema(app: FastAPI) -> Json:
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schema["info"]["license"] = {"name": "Apache 2.0", "identifier": "Apache-2.0"}
    schema["servers"] = [{"url": "/", "description": "Where this document came from."}]
    schema["tags"] = [{"name": name, "description": text} for name, text in TAGS.items()]
    components = schema.setdefault("components", {})
    for name, adapter in (("Problem", TypeAdapter(Problem)), ("Event", TypeAdapter(Event))):
        described = adapter.json_schema(ref_template="#/components/schemas/{model}", mode="serialization")
        components["schemas"] = described.pop("$defs", {}) | components["schemas"] | {name: described}
    components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{}, {"bearer": []}]
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    for route in app.routes:
        if isinstance(route, APIRoute):
            for method in route.methods:
                _complete(schema["paths"][route.path_format][method.lower()], route, method)
    _give_examples(schema)
    return schema


def _complete(operation: Json, route: APIRoute, method: str) -> None:
    """Add the problems that every route of this kind can answer with."""
    codes: Iterable[Code] = _EVERYWHERE
    if isinstance(route, UploadRoute):
        codes = (*codes, *_UPLOAD_BODY)
    elif isinstance(route, JsonRoute) and method not in ("GET", "HEAD"):
        codes = (*codes, *_JSON_BODY)
    elif route.dependant.query_params or route.dependant.path_params:
        codes = (*codes, Code.BAD_VALUE)
    _name_body(operation)
    responses = operation["responses"]
    for status, response in problems(*codes).items():
        named = dict.fromkeys((*_codes_of(responses.get(str(status), {})), *_codes_of(response)))
        responses[str(status)] = _problem_response(named, int(status))
    operation["responses"] = dict(sorted(responses.items()))


def _name_body(operation: Json) -> None:
    """A body that may be left out is no body, not `null`."""
    for media in operation.get("requestBody", {}).get("content", {}).values():
        match media["schema"]:
            case {"anyOf": [{"$ref": reference}, {"type": "null"}]}:
                media["schema"] = {"$ref": reference}


def _codes_of(response: Json) -> list[Code]:
    problem: Json = response.get("content", {}).get(MEDIA_TYPE, {})
    return [Code(code) for code in problem.get("examples", ())]  # FastAPI's own 422, never sent, has none


def _problem_response(codes: Iterable[Code], status: int) -> Json:
    """One model for all, so that generated clients have one; which codes it can have is told by examples."""
    named = list(codes)
    text = "; ".join(f"`{code}`: {STATUS[code][1]}" for code in named)
    examples = {str(code): {"$ref": f"#/components/examples/{_example(code, status)}"} for code in named}
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": examples}}
    response: Json = {"description": text, "content": content}
    if {Code.BUSY, Code.IN_PROGRESS, Code.ENGINE_UNAVAILABLE} & set(named):
        response["headers"] = {"Retry-After": RETRY_AFTER}
    return response


def _example(code: Code, status: int) -> str:
    return str(code) if STATUS[code][0] == status else f"{code}_{status}"


def _give_examples(schema: Json) -> None:
    """Examples beside every reference to a model, and those that the problems name."""
    named: dict[str, Json] = {}
    for operation in (one for methods in schema["paths"].values() for one in methods.values()):
        answers = operation["responses"]
        examples.give(
            one["content"]
            for one in (operation.get("requestBody", {}), *answers.values())
            if "content" in one
        )
        for status, answer in answers.items():
            for code in _codes_of(answer):
                value = examples.problem(code, int(status))
                named[_example(code, int(status))] = {"summary": STATUS[code][1], "value": value}
    schema["components"]["examples"] = dict(sorted(named.items()))
