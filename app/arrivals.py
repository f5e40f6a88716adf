"""Bodies that arrive, told in the feed."""

import asyncio
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http import HTTPStatus

from starlette.responses import Response

from app.feed import Feed
from app.problems import as_problem
from schemas.events import UploadEvent, UploadState
from schemas.problems import Code

_STEP_S = 0.2
"""Least time between two events of one body that is arriving."""


class Arrival:
    """One body, from its first byte until it is accepted or refused."""

    def __init__(
        self,
        feed: Feed,
        transaction: str | None,
        place: tuple[int | None, int | None],
        nbytes: int | None,
    ) -> None:
        self._feed = feed
        self._clock = asyncio.get_running_loop().time
        self._told_at = self._clock()
        self._received = 0
        self._event = UploadEvent(
            id=secrets.token_hex(8),
            state=UploadState.RECEIVING,
            transaction=transaction,
            layer=place[0],
            expert=place[1],
            received=0,
            nbytes=nbytes,
        )
        feed.publish(self._event)

    def received(self, nbytes: int) -> None:
        """So many bytes have arrived in all."""
        self._received = nbytes
        if self._clock() - self._told_at >= _STEP_S:
            self._told_at = self._clock()
            self._tell()

    def accepted(self, transaction: str | None) -> None:
        """It belongs to this transaction now; what becomes of that is another story."""
        self._end(UploadState.ACCEPTED, transaction=transaction)

    def answered(self, response: Response, transaction: str | None) -> None:
        """If nobody has judged it, the same request was answered before, and got that answer again."""
        if response.status_code < HTTPStatus.BAD_REQUEST:
            self.accepted(transaction)
        else:
            self._end(UploadState.REFUSED, code=_code_of(response))

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Whatever is raised within is why it is refused, unless it has been accepted."""
        try:
            yield
        except Exception as error:
            self._end(UploadState.REFUSED, code=as_problem(error).code)
            raise
        except BaseException:
            self._end(UploadState.REFUSED, code=Code.CLIENT_GONE)
            raise

    def _end(self, state: UploadState, **members: object) -> None:
        if self._event.state is UploadState.RECEIVING:
            self._tell(state=state, **members)

    def _tell(self, **members: object) -> None:
        now = {"at": datetime.now(UTC), "received": self._received, **members}
        self._event = self._event.model_copy(update=now)
        self._feed.publish(self._event)


def _code_of(response: Response) -> Code | None:
    """Why a stored answer refuses; none if another release wrote it for a reason that is not known here."""
    try:
        return Code(json.loads(bytes(response.body))["code"])
    except ValueError:
        return None
