"""The stream of events as a client reads it: where it stands, and when to connect again.

Nothing is sent or received here: both clients do that with httpx-sse.
"""

from collections.abc import Callable
from dataclasses import dataclass

import httpx
from httpx_sse import ServerSentEvent, SSEError
from pydantic import TypeAdapter, ValidationError

from app.remote.attempts import LONGEST_PAUSE_S, PASSING, Retry, said
from app.remote.errors import BadAnswer, Unreachable, answered
from schemas.events import Event

PATH = "/v1/events"
SILENCE_S = 45.0
"""A connection that has said nothing for so long is lost: the service says something every 15 s."""

Connection = Callable[[Unreachable | None], None]
"""Is told once when the service can't be reached, and with none when it can be again."""

_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


@dataclass(frozen=True)
class Told:
    """An event as it came."""

    id: str
    """The stream goes on after it: `events(last_event_id=…)`."""
    event: Event
    text: str
    """Its JSON, with what this client does not know yet."""


class Course:
    """How one reader goes along the stream, over as many connections as it takes."""

    def __init__(self, last_event_id: str | None, retry: Retry, connection: Connection) -> None:
        self._last = last_event_id
        self._shortest = self._pause = retry.pause_s
        self._connection = connection
        self._away = False

    def headers(self) -> dict[str, str]:
        """What to send, so that nothing is missed and nothing comes twice."""
        return {"last-event-id": self._last} if self._last else {}

    def begun(self) -> None:
        """The service answers."""
        if self._away:
            self._away = False
            self._connection(None)

    def told(self, frame: ServerSentEvent) -> Told | None:
        """An event, if the frame is one of a type that this client knows. Raises BadAnswer."""
        if frame.retry is not None:
            self._shortest = self._pause = min(frame.retry / 1000, LONGEST_PAUSE_S)
        if not frame.data:
            return None
        self._pause = self._shortest
        self._last = frame.id or self._last
        try:
            return Told(frame.id, _EVENT.validate_json(frame.data), frame.data)
        except ValidationError as error:
            if error.errors()[0]["type"] == "union_tag_invalid":
                return None  # newer services may tell of more
            raise BadAnswer(f"an event that is none of Graft's: {error}") from error

    def ended(self) -> float:
        """Seconds to wait after the service has ended the stream, as it does before it ends itself."""
        return self._lost("the stream of events has ended")

    def failed(self, error: httpx.HTTPError) -> float:
        """Seconds to wait after a lost connection. Raises what another one would not mend."""
        if isinstance(error, SSEError):
            raise BadAnswer(f"{PATH} does not answer as Graft does: {error}") from error
        if not isinstance(error, PASSING):
            raise _unreachable(said(error)) from error
        return self._lost(said(error))

    def refused(self, response: httpx.Response) -> float:
        """Seconds to wait after an answer without success, which has been read. Raises Refused, BadAnswer."""
        error = answered(response)
        if isinstance(error, BadAnswer) and response.is_server_error:
            return self._lost(str(error))  # from a proxy, while there is nobody behind it
        raise error

    def _lost(self, why: str) -> float:
        if not self._away:
            self._away = True
            self._connection(_unreachable(why))
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE_S)
        return pause


def _unreachable(why: str) -> Unreachable:
    return Unreachable(f"Graft can't be reached: {why}")
