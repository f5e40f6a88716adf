"""First answers, kept for requests that are sent again, also across a restart."""

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from blake3 import blake3
from starlette.requests import Request
from starlette.responses import Response

from app.journal import Journal
from app.problems import respond
from app.records import Reply, Ticket
from schemas.problems import Code, ProblemError

HEADER = "idempotency-key"
LONGEST = 255
"""Characters of a key."""
_log = logging.getLogger(__name__)

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
        Code.BLOB_BUDGET,
        Code.DISK_FULL,
        Code.ENGINE_MEMORY,
        Code.BASE_CHANGED,
        Code.LEDGER_DAMAGED,
        Code.VERSION_LOST,
        Code.CLIENT_GONE,
        Code.BODY_TIMEOUT,
    }
)
"""Refusals that changed nothing and that the same request may overcome later."""


@dataclass
class _Entry:
    fingerprint: str
    reply: Reply | None = None


class Replies:
    """Answers by idempotency key; the oldest finished ones make room for new ones."""

    def __init__(self, limit: int, journal: Journal) -> None:
        self._limit = limit
        self._journal = journal
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def begin(self, replies: Iterable[Reply]) -> None:
        """Take over what an earlier process answered."""
        for reply in replies:
            self.remember(reply)

    def remember(self, reply: Reply) -> None:
        """An answer that is in the ledger already."""
        self._entries.setdefault(reply.key, _Entry(reply.fingerprint)).reply = reply

    def known(self, key: str | None) -> bool:
        """Whether a request with this key has been answered or is running."""
        return key in self._entries

    async def once(self, ticket: Ticket | None, run: Callable[[], Awaitable[Response]]) -> Response:
        """The first answer for `ticket`, from `run` if there is none yet.

        Raises idempotency_mismatch, in_progress, and what `run` raises.
        """
        if ticket is None:
            return await run()
        entry = self._entries.get(ticket.key)
        if entry is not None:
            return _replay(entry, ticket)
        entry = self._entries[ticket.key] = _Entry(ticket.fingerprint)
        try:
            response = await run()
            await self._keep(entry, ticket, response)
        except ProblemError as error:
            if error.code not in _TRY_AGAIN:
                await self._keep(entry, ticket, respond(error))
            raise
        finally:
            if entry.reply is None:
                del self._entries[ticket.key]
        return response

    async def _keep(self, entry: _Entry, ticket: Ticket, response: Response) -> None:
        entry.reply = reply_of(ticket, response)
        forgotten = self._shrink()
        try:
            await self._journal.put_reply(entry.reply, forgotten)
        except ProblemError:
            # What was asked for has been done, or refused, whether or not this can be kept.
            _log.exception("keeping the answer of an idempotency key")

    def _shrink(self) -> list[str]:
        finished = [key for key, entry in self._entries.items() if entry.reply is not None]
        forgotten = finished[: max(0, len(finished) - self._limit)]
        for key in forgotten:
            del self._entries[key]
        return forgotten


def ticket_of(request: Request, body_digest: str) -> Ticket | None:
    """The request's idempotency key, and what makes it the same as another.

    That is method, path, query, body and If-Match. Raises bad_request if the key is malformed.
    """
    key = key_of(request)
    if key is None:
        return None
    parts = (
        request.method,
        request.url.path,
        request.url.query,
        request.headers.get("if-match", ""),
        body_digest,
    )
    return Ticket(key, blake3("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest())


def key_of(request: Request) -> str | None:
    """The request's idempotency key; raises bad_request if it is malformed."""
    key = request.headers.get(HEADER)
    if key is not None and not (0 < len(key) <= LONGEST and key.isascii() and key.isprintable()):
        raise ProblemError(
            Code.BAD_REQUEST, f"Idempotency-Key takes 1 to {LONGEST} printable ASCII characters."
        )
    return key


def reply_of(ticket: Ticket, response: Response) -> Reply:
    """A response as it is kept."""
    headers = tuple((name, value) for name, value in response.headers.items() if name != "content-length")
    return Reply(ticket.key, ticket.fingerprint, response.status_code, headers, bytes(response.body))


def _replay(entry: _Entry, ticket: Ticket) -> Response:
    if entry.fingerprint != ticket.fingerprint:
        raise ProblemError(Code.IDEMPOTENCY_MISMATCH, "Use a new key for another request.")
    if entry.reply is None:
        raise ProblemError(Code.IN_PROGRESS, "Ask again with the same key when the first request has ended.")
    return Response(entry.reply.body, entry.reply.status, dict(entry.reply.headers))
