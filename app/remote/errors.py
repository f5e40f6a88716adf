"""What can come of a request instead of an answer, one class per kind of trouble."""

from collections.abc import Mapping
from typing import Any

import httpx

from schemas.problems import Code


class GraftError(Exception):
    """Whatever a client of Graft raises by itself; the text says what to do about it where that is known."""


class Unreachable(GraftError):
    """Nobody answered, and what was asked for has not been done."""


class BadAnswer(GraftError):
    """Somebody answered, but not as Graft does."""


class AnswerLost(GraftError):
    """A change was sent and no answer of Graft's came: it may have been made.

    `key` leads to what became of it: sent again with the same request, or as an operation's id.
    """

    def __init__(self, detail: str, key: str) -> None:
        super().__init__(detail)
        self.key = key


class Refused(GraftError):
    """Graft said no; `code` is one of its stable codes, `problem` the whole document (RFC 9457)."""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        self.status = status
        self.problem = dict(problem)
        self.code = str(problem.get("code", ""))
        self.detail = str(problem.get("detail", ""))
        super().__init__(f"{self.code}: {self.detail}")


class Conflict(Refused):
    """The version has moved on, something else is under way, or what was named has ended."""


class NotDone(Refused):
    """The engine or the service could not do it now. The old weights serve."""


class StateUnknown(Refused):
    """Nobody can say what the engine runs, or what became of the request."""


def refusal(status: int, problem: Mapping[str, Any]) -> Refused:
    """The refusal of the kind that a problem document belongs to."""
    if problem.get("code") == Code.STATE_UNKNOWN or status == httpx.codes.INTERNAL_SERVER_ERROR:
        return StateUnknown(status, problem)
    if status in (httpx.codes.CONFLICT, httpx.codes.GONE, httpx.codes.PRECONDITION_FAILED):
        return Conflict(status, problem)
    if status >= httpx.codes.INTERNAL_SERVER_ERROR:
        return NotDone(status, problem)
    return Refused(status, problem)


def answered(response: httpx.Response) -> GraftError:
    """What an answer without success stands for; its body has been read."""
    try:
        document = response.json()
    except ValueError:
        document = None
    if isinstance(document, dict) and isinstance(document.get("code"), str):
        return refusal(response.status_code, document)
    return BadAnswer(f"{response.request.url} answered {response.status_code}, but not as Graft does")
