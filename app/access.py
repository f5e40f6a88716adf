"""Who may ask: bearer token, Host and Origin checks, as plain ASGI middleware."""

import hmac
from typing import Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.problems import respond
from app.settings import Settings
from app.token import is_loopback
from schemas.problems import Code, ProblemError

DASHBOARD = "/dashboard/"
"""Below this are the files of the page at `/`, and nothing else."""
_OPEN_PATHS = frozenset({"/health/live", "/"})


class TokenSource(Protocol):
    """Where the middleware finds the token; it is read when the app starts, not when it is made."""

    token: str | None


class Access:
    """Refuses strangers before any route, or any byte of a body, is looked at."""

    def __init__(self, app: ASGIApp, settings: Settings, source: TokenSource) -> None:
        self._app = app
        self._source = source
        self._origins = frozenset(settings.allowed_origins)
        self._hosts: frozenset[str] | None = frozenset(settings.allowed_hosts)
        if is_loopback(settings.host):
            # A web page can point its own name at 127.0.0.1; only these names are ours.
            self._hosts |= {"localhost", "127.0.0.1", "::1", settings.host.strip("[]")}
        elif not self._hosts:
            self._hosts = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        refusal = self._refusal(scope["path"], Headers(scope=scope))
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await respond(refusal)(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> ProblemError | None:
        if not self._host_allowed(headers):
            return ProblemError(
                Code.BAD_HOST, "Use a loopback address, or list the name in GRAFT_ALLOWED_HOSTS."
            )
        if not self._origin_allowed(headers):
            return ProblemError(Code.BAD_ORIGIN, "List the origin in GRAFT_ALLOWED_ORIGINS if it is yours.")
        is_open = path in _OPEN_PATHS or path.startswith(DASHBOARD)
        if not is_open and not self._token_valid(headers):
            return ProblemError(Code.UNAUTHORIZED, "Send the header Authorization: Bearer <token>.")
        return None

    def _host_allowed(self, headers: Headers) -> bool:
        if self._hosts is None:
            return True
        values = headers.getlist("host")
        return len(values) == 1 and _hostname(values[0]) in self._hosts

    def _origin_allowed(self, headers: Headers) -> bool:
        origins = headers.getlist("origin")
        same = "//" + headers.get("host", "")
        return all(
            o in self._origins or o.removeprefix("http:").removeprefix("https:") == same for o in origins
        )

    def _token_valid(self, headers: Headers) -> bool:
        token = self._source.token
        if token is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode("latin-1"), token.encode())
        return right and scheme.lower() == "bearer"


def _hostname(host: str) -> str | None:
    try:
        return urlsplit("//" + host).hostname
    except ValueError:
        return None
