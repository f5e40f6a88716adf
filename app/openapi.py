"""What FastAPI can't say by itself in /openapi.json: binary bodies, headers, problems."""

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from app.bodies import JsonRoute, UploadRoute
from app.problems import MEDIA_TYPE
from schemas.operations import Operation
from schemas.problems import STATUS, Code, Problem

Json = dict[str, Any]

UPLOAD_TYPES = ("application/octet-stream", "application/vnd.safetensors")
SAFETENSORS = "application/vnd.safetensors"

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
    return {status: _problem_response(group) for status, group in sorted(by_status.items())}


def json_parameters(*, if_match: bool = False, prefer: bool = False) -> Json:
    """Request headers of a route that changes state, for `openapi_extra`."""
    more = [*([_IF_MATCH] if if_match else []), *([_PREFER] if prefer else [])]
    return {"parameters": [_IDEMPOTENCY_KEY, *more]}


def upload_body(*, if_match: bool = False) -> Json:
    """The binary body and the headers of an upload, for `openapi_extra`."""
    binary = {"schema": {"type": "string", "format": "binary"}}
    body = {
        "required": True,
        "description": "A safetensors file.",
        "content": dict.fromkeys(UPLOAD_TYPES, binary),
    }
    parameters = [*json_parameters(if_match=if_match)["parameters"], _CONTENT_DIGEST]
    return {"requestBody": body, "parameters": parameters}


def tagged(description: str, *, location: bool = False, status: int = 201) -> dict[int | str, Json]:
    """A 200 that carries the version as ETag, or another `status` that carries a Location."""
    if location:
        return {status: {"description": description, "headers": {"Location": _LOCATION}}}
    return {200: {"description": description, "headers": {"ETag": _ETAG}}}


def accepted() -> dict[int | str, Json]:
    """A 202 that names an operation to follow, for those who prefer that."""
    description = "The operation to follow, if `Prefer: respond-async` was sent."
    return {202: {"model": Operation, "description": description, "headers": {"Location": _LOCATION}}}


def binary_answer(description: str) -> dict[int | str, Json]:
    """A 200 whose body is a safetensors file of one version."""
    content = {SAFETENSORS: {"schema": {"type": "string", "format": "binary"}}}
    return {200: {"description": description, "content": content, "headers": {"ETag": _ETAG}}}


def install(app: FastAPI) -> None:
    """Serve a schema that tells what all routes have in common, too."""

    def openapi() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend it


def _schema(app: FastAPI) -> Json:
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = schema.setdefault("components", {})
    components["schemas"]["Problem"] = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    components["schemas"].update(components["schemas"]["Problem"].pop("$defs", {}))
    components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{}, {"bearer": []}]
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    for route in app.routes:
        if isinstance(route, APIRoute):
            for method in route.methods:
                _complete(schema["paths"][route.path_format][method.lower()], route, method)
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
    responses = operation["responses"]
    for status, response in problems(*codes).items():
        known = responses.get(str(status))
        named = _codes_of(known) if known else []
        responses[str(status)] = _problem_response(
            [*named, *(c for c in _codes_of(response) if c not in named)]
        )
    operation["responses"] = dict(sorted(responses.items()))


def _codes_of(response: Json) -> list[Code]:
    if MEDIA_TYPE not in response.get("content", {}):
        return []  # FastAPI's own 422, which is never sent
    restricted = response["content"][MEDIA_TYPE]["schema"]["allOf"][1]
    return [Code(code) for code in restricted["properties"]["code"]["enum"]]


def _problem_response(codes: list[Code]) -> Json:
    text = "; ".join(f"`{code}`: {STATUS[code][1]}" for code in codes)
    headers = (
        {"Retry-After": _RETRY_AFTER}
        if {Code.BUSY, Code.IN_PROGRESS, Code.ENGINE_UNAVAILABLE} & set(codes)
        else {}
    )
    schema = {
        "allOf": [
            {"$ref": "#/components/schemas/Problem"},
            {
                "type": "object",
                "properties": {"code": {"type": "string", "enum": [str(code) for code in codes]}},
            },
        ]
    }
    response: Json = {"description": text, "content": {MEDIA_TYPE: {"schema": schema}}}
    return {**response, "headers": headers} if headers else response


def _header(name: str, description: str) -> Json:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": description,
        "schema": {"type": "string"},
    }


_IDEMPOTENCY_KEY = _header("Idempotency-Key", "The same key and request again gets the first answer.")
_IF_MATCH = _header("If-Match", 'Go on only if this is the current version, for example "7".')
_PREFER = _header("Prefer", "respond-async: answer 202 with an operation to follow, and go on.")
_CONTENT_DIGEST = _header("Content-Digest", "Checked if sent: sha-256=:BASE64:")
_ETAG = {"description": "The version, in quotes.", "schema": {"type": "string"}}
_LOCATION = {"description": "Where the new thing is.", "schema": {"type": "string"}}
_RETRY_AFTER = {"description": "Seconds to wait before asking again.", "schema": {"type": "integer"}}
