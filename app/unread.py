"""Closes the connection after an answer that came before the request's body was read to its end."""

import asyncio

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_S = 1.0
"""How long to go on taking bytes after such an answer: a client that still sends may otherwise lose it."""


class CloseUnread:
    """ASGI middleware: such answers carry `Connection: close`, and the connection ends after a short linger.

    A client that asked for `100 Continue` and was not given it has sent nothing: there is no linger then.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(receive, send, waits="expect" in Headers(scope=scope))
        await self._app(scope, exchange.receive, exchange.send)


class _Exchange:
    """One request with a body, and its answer."""

    def __init__(self, receive: Receive, send: Send, waits: bool) -> None:
        self._receive = receive
        self._send = send
        self._waits = waits
        self._complete = False
        self._closing = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._waits = False
        self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and not self._complete:
            self._closing = True
            MutableHeaders(scope=message)["connection"] = "close"
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not self._closing or not last or self._waits:
            await self._send(message)
            return
        await self._send({**message, "more_body": True})
        await self._linger()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _linger(self) -> None:
        try:
            async with asyncio.timeout(LINGER_S):
                while not self._complete:
                    await self.receive()
        except TimeoutError:
            pass


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
