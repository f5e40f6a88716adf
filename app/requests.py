"""Every request has an id, which its answer carries, and leaves one line in the log and in the metrics."""

import json
import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.logs import bound, event
from app.metrics import Metrics
from app.problems import MEDIA_TYPE, respond

HEADER = "x-request-id"
_WELL_FORMED = re.compile(r"[A-Za-z0-9._~:+/=-]{1,128}")
_POLLED = frozenset({"/health/live", "/health/ready", "/metrics"})
"""Asked every few seconds: at level debug, or they would bury everything else."""
_log = logging.getLogger(__name__)


class Requests:
    """The outermost ASGI middleware: nothing is answered behind its back."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(_id_of(Headers(scope=scope)), receive, send)
        with bound(request=exchange.id):
            try:
                await self._app(scope, exchange.receive, exchange.send)
            except Exception as error:
                if exchange.status is not None:
                    raise  # half an answer: all that the server can do is to close the connection
                _log.exception("a request broke")
                await respond(error)(scope, receive, exchange.send)
            finally:
                self._note(scope, exchange)

    def _note(self, scope: Scope, exchange: "_Exchange") -> None:
        route = getattr(scope.get("route"), "path", "none")
        self._metrics.answered(scope["method"], route, exchange.status, exchange.code)
        level = logging.DEBUG if route in _POLLED else logging.INFO
        event(
            _log,
            level,
            "request",
            method=scope["method"],
            path=scope["path"],
            status=exchange.status,
            **({"code": exchange.code} if exchange.code else {}),
            ms=round(1e3 * (time.perf_counter() - exchange.begun), 1),
            received=exchange.received,
            client=scope["client"][0] if scope.get("client") else None,
        )


class _Exchange:
    """One request and its answer, as they pass."""

    def __init__(self, id: str, receive: Receive, send: Send) -> None:
        self.id = id
        self.begun = time.perf_counter()
        self.received = 0
        """Bytes of the body so far."""
        self.status: int | None = None
        self.code: str | None = None
        """Of the refusal, if it is one."""
        self._receive = receive
        self._send = send
        self._problem = False

    async def receive(self) -> Message:
        message = await self._receive()
        self.received += len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers[HEADER] = self.id
            self.status = message["status"]
            self._problem = headers.get("content-type") == MEDIA_TYPE
        elif self._problem and message.get("body"):
            self._problem = False  # problem documents are sent in one piece
            self.code = json.loads(message["body"])["code"]
        await self._send(message)


def _id_of(headers: Headers) -> str:
    """The client's own id for the request if it is harmless, else a new one."""
    given = headers.get(HEADER, "")
    return given if _WELL_FORMED.fullmatch(given) else secrets.token_hex(8)
