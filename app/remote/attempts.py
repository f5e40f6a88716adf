"""Whether to send a request again, and when: decided here for all clients, without sending anything."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from app.remote.call import Call
from app.remote.errors import AnswerLost, BadAnswer, GraftError, Refused, Unreachable, answered
from schemas.problems import Code

PASSING = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)
"""Troubles of a connection that another one may not have."""
LONGEST_PAUSE_S = 10.0
_UNCONNECTED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass(frozen=True)
class Retry:
    """How stubborn a client is. Repeating is safe: a change carries a key, and is made once."""

    times: int = 5
    """Repetitions after a lost connection, a proxy's 5xx, or a 503 that says when to come again."""
    pause_s: float = 0.25
    """Before the first repetition after a lost connection or a proxy's 5xx; doubled for each further one."""
    patience_s: float = 3600
    """How long to wait in all for the end of a change that was sent before and still runs."""


class Attempts:
    """The course of one call. Each method returns seconds to wait before sending again, or raises."""

    def __init__(self, call: Call[Any], retry: Retry) -> None:
        self._call = call
        self._retry = retry
        self._left = retry.times
        self._pause = retry.pause_s
        self._waited = 0.0
        self._begun = self._sent = False
        """Whether some, and all, of the latest request was sent, without which nothing is done."""
        self._lost = False
        """Whether one was, and no answer of Graft's came."""

    def chunks(self) -> Iterator[bytes]:
        """The body of the next attempt."""
        self._begun, self._sent = True, False
        yield from self._call.content()
        self._sent = True

    def failed(self, error: httpx.HTTPError) -> float:
        """After a connection that came to nothing. Raises Unreachable, AnswerLost."""
        cut = self._begun and not self._sent
        self._lost = self._lost or (self._sent and not isinstance(error, _UNCONNECTED))
        self._begun = self._sent = False
        if not isinstance(error, PASSING) or not self._left:
            early = "the connection ended before all was sent, perhaps since it was refused: " if cut else ""
            raise self._given_up(early + said(error)) from error
        return self._repetition()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around the reading of an answer with success. Raises AnswerLost if a change's can't be read."""
        try:
            yield
        except BadAnswer as error:
            self._lost = self._lost or self._sent
            if self._lost and self._call.changes:
                raise self._given_up(str(error)) from error
            raise

    def refused(self, response: httpx.Response) -> float:
        """After an answer without success, which has been read. Raises the GraftError that it stands for."""
        error = answered(response)
        pause = _retry_after(response)
        # A proxy's, whose connection to the service may have broken after all had passed.
        proxy = isinstance(error, BadAnswer) and response.is_server_error
        self._lost = self._lost or (proxy and self._sent)
        self._begun = self._sent = False
        if proxy and self._left:
            return self._repetition()
        if isinstance(error, BadAnswer):
            raise self._given_up(str(error)) if self._lost and self._call.changes else error
        assert isinstance(error, Refused)
        if error.code == Code.IN_PROGRESS and pause is not None and self._waited < self._retry.patience_s:
            self._waited += pause
            return pause
        passing = error.status == httpx.codes.SERVICE_UNAVAILABLE and pause is not None
        if passing and pause is not None and self._left:
            self._left -= 1
            return pause
        if self._lost and self._call.changes and (passing or error.code == Code.IN_PROGRESS):
            raise self._given_up(error.detail)  # what was sent first may have been done all the same
        raise error

    def _repetition(self) -> float:
        self._left -= 1
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE_S)
        return pause

    def _given_up(self, why: str) -> GraftError:
        if self._lost and self._call.changes:
            return AnswerLost(
                f"no answer to a change that may have been made: {why}; see the versions before repeating it",
                self._call.key,
            )
        return Unreachable(f"Graft can't be reached: {why}")


def said(error: httpx.HTTPError) -> str:
    """What went wrong, and with which address."""
    text = str(error) or type(error).__name__
    return f"{text} ({error.request.url.copy_with(query=None)})"


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds that the answer asks to wait, at most a minute; none if it does not ask."""
    value = response.headers.get("retry-after", "")
    return min(float(value), 60.0) if value.isascii() and value.isdigit() else None
