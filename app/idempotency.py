"""First answers, kept for requests that are sent again. Kept in memory."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from blake3 import blake3
from starlette.requests import Request
from starlette.responses import Response

from app.problems import respond
from schemas.problems import Code, ProblemError

HEADER = "idempotency-key"
_LONGEST = 255

_TRY_AGAIN = frozenset(
    {
        Code.BUSY,
        Code.IN_PROGRESS,
        Code.ENGINE_UNAVAILABLE,
        Code.RECOVERING,
        Code.PREPARE_FAILED,
        Code.ENGINE_ASLEEP,
        Code.DRAIN_TIMEOUT,
        Code.STAGED_BUDGET,
        Code.UNDO_BUDGET,
        Code.DISK_FULL,
        Code.CLIENT_GONE,
        Code.BODY_TIMEOUT,
    }
)
"""Refusals that changed nothing and that the same request may overcome later."""


@dataclass
class _Entry:
    fingerprint: str
    reply: Response | None = None


class Replies:
    """Answers by idempotency key; the oldest finished ones make room for new ones."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def known(self, key: str | None) -> bool:
        """Whether a request with this key has been answered or is running."""
        return key in self._entries

    async def once(
        self, key: str | None, fingerprint: str, run: Callable[[], Awaitable[Response]]
    ) -> Response:
        """The first answer for `key`, from `run` if there is none yet.

        Raises idempotency_mismatch, in_progress, and what `run` raises.
        """
        if key is None:
            return await run()
        entry = self._entries.get(key)
        if entry is not None:
            return _replay(entry, fingerprint)
        entry = self._entries[key] = _Entry(fingerprint)
        try:
            entry.reply = await run()
        except ProblemError as error:
            if error.code not in _TRY_AGAIN:
                entry.reply = respond(error)
            raise
        finally:
            if entry.reply is None:
                del self._entries[key]
            self._shrink()
        return entry.reply

    def _shrink(self) -> None:
        if len(self._entries) <= self._limit:
            return
        finished = [key for key, entry in self._entries.items() if entry.reply is not None]
        for key in finished[: max(0, len(finished) - self._limit)]:
            del self._entries[key]


def key_of(request: Request) -> str | None:
    """The request's idempotency key; raises bad_request if it is malformed."""
    key = request.headers.get(HEADER)
    if key is not None and not (0 < len(key) <= _LONGEST and key.isascii() and key.isprintable()):
        raise ProblemError(
            Code.BAD_REQUEST, f"Idempotency-Key takes 1 to {_LONGEST} printable ASCII characters."
        )
    return key


def fingerprint_of(request: Request, body_digest: str) -> str:
    """What makes a request the same as another: method, path, query, body, If-Match."""
    parts = (
        request.method,
        request.url.path,
        request.url.query,
        request.headers.get("if-match", ""),
        body_digest,
    )
    return blake3("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _replay(entry: _Entry, fingerprint: str) -> Response:
    if entry.fingerprint != fingerprint:
        raise ProblemError(Code.IDEMPOTENCY_MISMATCH, "Use a new key for another request.")
    if entry.reply is None:
        raise ProblemError(Code.IN_PROGRESS, "Ask again with the same key when the first request has ended.")
    return entry.reply
