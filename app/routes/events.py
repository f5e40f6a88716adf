"""Everything that happens, as server-sent events."""

from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from http import HTTPStatus

from fastapi import APIRouter, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.openapi import EVENT_STREAM, event_stream, last_event, problems
from app.service import ServiceDep
from schemas.problems import Code

router = APIRouter(prefix="/v1", tags=["status"])


class _Stream(StreamingResponse):
    """Ends with the connection: what it reads from is closed at once, not when it is collected.

    `room` is left then, too. It is taken before, so that requests that come at once can't be too many.
    """

    media_type = EVENT_STREAM

    def __init__(
        self, content: AsyncGenerator[bytes, None], room: ExitStack, status_code: int = HTTPStatus.OK
    ) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(content, status_code, headers)  # the document has it from the signature
        self._room = room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._room:
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]  # it is an async generator
            await super().stream_response(send)


@router.get(
    "/events",
    response_class=_Stream,
    openapi_extra=last_event(),
    responses=event_stream("Events, for as long as both sides wish.") | problems(Code.TOO_MANY_READERS),
)
async def events(service: ServiceDep, request: Request) -> _Stream:
    """What happens, as it happens: read the state after `reset`, and stay up to date by what follows."""
    room = ExitStack()
    room.enter_context(service.feed.reader())
    return _Stream(service.feed.stream(request.headers.get("last-event-id")), room)
