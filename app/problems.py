"""The one place where exceptions become responses (RFC 9457)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from schemas.problems import Code, ProblemError

MEDIA_TYPE = "application/problem+json"
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

_HTTP_CODES = {404: Code.NOT_FOUND, 405: Code.METHOD_NOT_ALLOWED, 413: Code.BODY_TOO_LARGE}
_RETRY_AFTER_S = {Code.IN_PROGRESS: 1, Code.BUSY: 1, Code.ENGINE_UNAVAILABLE: 5, Code.RECOVERING: 5}


def as_problem(error: Exception) -> ProblemError:
    """The refusal that `error` stands for. Never repeats what the client sent."""
    if isinstance(error, ProblemError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors())
    if isinstance(error, HTTPException):
        return _http(error)
    if isinstance(error, ClientDisconnect):
        return ProblemError(Code.CLIENT_GONE, "The client closed the connection.")
    return ProblemError(Code.INTERNAL, "Something broke inside Graft; its log has the details.")


def respond(error: Exception, status: int | None = None) -> Response:
    """The problem document for `error`; `status` overrides the one of its code."""
    refusal = as_problem(error)
    document = refusal.problem()
    if status is not None:
        document = document.model_copy(update={"status": status})
    response = JSONResponse(document.model_dump(mode="json"), document.status, media_type=MEDIA_TYPE)
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    if refusal.code in _RETRY_AFTER_S:
        response.headers["retry-after"] = str(_RETRY_AFTER_S[refusal.code])
    if refusal.code is Code.UNAUTHORIZED:
        response.headers["www-authenticate"] = "Bearer"
    return response


def install(app: FastAPI) -> None:
    """Answer every exception of the app's routes with a problem document."""

    async def handle(request: Request, error: Exception) -> Response:
        return respond(error)

    for kind in (ProblemError, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, handle)


def _invalid(errors: Sequence[Mapping[str, Any]]) -> ProblemError:
    """List where the values are wrong; `input` and `ctx` may hold the client's bytes."""
    causes = [{"where": [_named(part) for part in e["loc"]], "what": e["msg"]} for e in errors[:20]]
    if any(e["type"] == "json_invalid" for e in errors):
        return ProblemError(Code.BAD_JSON, "The body is not valid JSON.", errors=causes)
    return ProblemError(Code.BAD_VALUE, "Some values are missing or have the wrong form.", errors=causes)


def _named(part: object) -> str | int:
    """A step of a location: a place in a list, or a name unless it is something odd that was sent."""
    if isinstance(part, int):
        return part
    return str(part) if _NAME.fullmatch(str(part)) else "?"


def _http(error: HTTPException) -> ProblemError:
    code = _HTTP_CODES.get(error.status_code)
    if code is Code.NOT_FOUND:
        return ProblemError(code, "There is nothing at this path; /openapi.json lists what there is.")
    if code is Code.METHOD_NOT_ALLOWED:
        return ProblemError(code, "This path does not take this method; see the Allow header.")
    if code is not None:
        return ProblemError(code, "The request was refused.")
    if error.status_code < 500:
        return ProblemError(Code.BAD_JSON, "The body could not be read as JSON.")
    return ProblemError(Code.INTERNAL, "Something broke inside Graft; its log has the details.")
