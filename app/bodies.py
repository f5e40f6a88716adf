"""How requests are read: bounded JSON of the right type, uploads, and answers given once."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from blake3 import blake3
from fastapi import Depends
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from app.idempotency import ticket_of
from app.records import Ticket
from app.service import Service
from app.settings import Settings
from schemas.problems import Code, ProblemError

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRoute(APIRoute):
    """A route that takes JSON or nothing. What changes state is done once per idempotency key."""

    def get_route_handler(self) -> Handler:
        """The route's handler behind the checks."""
        handle = super().get_route_handler()
        if self.methods <= {"GET", "HEAD"}:
            return handle
        takes_body = self.body_field is not None

        async def checked(request: Request) -> Response:
            service: Service = request.app.state.service
            bounded = JsonRequest(request.scope, request.receive, service.settings)
            body = await bounded.body()
            if body and not takes_body:
                raise ProblemError(Code.BAD_REQUEST, "This request takes no body.")
            bounded.state.ticket = ticket = ticket_of(request, blake3(body).hexdigest())
            return await service.tasks.finish(service.replies.once(ticket, lambda: handle(bounded)))

        return checked


async def _ticket(request: Request) -> Ticket | None:
    ticket: Ticket | None = request.state.ticket
    return ticket


TicketDep = Annotated[Ticket | None, Depends(_ticket)]
"""The request's idempotency key, as a parameter of a `JsonRoute`."""


class UploadRoute(APIRoute):
    """A route that takes a safetensors body, which its handler reads as a stream."""


class JsonRequest(Request):
    """A request whose body is JSON, arrives in time and is not large."""

    def __init__(self, scope: Scope, receive: Receive, settings: Settings) -> None:
        super().__init__(scope, receive)
        self._limit = settings.json_bytes
        self._bound_s = settings.json_s
        self._content: bytes | None = None

    async def body(self) -> bytes:
        """The body; raises content_type, content_encoding, body_too_large, body_timeout."""
        if self._content is None:
            self._content = await self._read() if self._announced() else b""
        return self._content

    async def json(self) -> Any:
        """The parsed body, stricter than the default: UTF-8, no NaN, no key twice."""
        try:
            text = (await self.body()).decode()
            return json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise ProblemError(Code.BAD_JSON, "The body is not valid JSON.") from error

    def _announced(self) -> bool:
        """Whether a body comes; its type is looked at first."""
        length = self.headers.get("content-length")
        if "transfer-encoding" not in self.headers and (length is None or length.strip() == "0"):
            return False
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ProblemError(Code.CONTENT_TYPE, "Send JSON with Content-Type: application/json.")
        if self.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise ProblemError(Code.CONTENT_ENCODING, "Send the JSON without Content-Encoding.")
        return True

    async def _read(self) -> bytes:
        content = bytearray()
        try:
            async with asyncio.timeout(self._bound_s):
                async for chunk in self.stream():
                    content += chunk
                    if len(content) > self._limit:
                        detail = f"JSON bodies are limited to {self._limit} bytes."
                        raise ProblemError(Code.BODY_TOO_LARGE, detail, limit=int(self._limit))
        except TimeoutError as error:
            raise ProblemError(
                Code.BODY_TIMEOUT, f"JSON bodies must arrive in {self._bound_s:g} s."
            ) from error
        return bytes(content)


def _refuse(constant: str) -> None:
    raise ValueError("NaN and Infinity are not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key occurs twice")
    return members
