"""Bodies that arrive, as they are told in the feed."""

import json
from typing import Any

import pytest
from starlette.responses import Response

from app.arrivals import Arrival
from app.feed import Feed
from schemas.events import UploadEvent, UploadState

pytestmark = pytest.mark.anyio


class Told(Feed):
    """A feed that remembers what was published."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def publish(self, event: Any) -> None:
        self.told.append(event)


async def test_a_chunk_costs_nothing_that_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two events no event is made; the next one has all the bytes, the last one too."""
    feed = Told()
    arrival = Arrival(feed, "t", (1, 2), 2000)
    made = 0
    copy = UploadEvent.model_copy

    def counted(event: UploadEvent, **options: Any) -> UploadEvent:
        nonlocal made
        made += 1
        return copy(event, **options)

    monkeypatch.setattr(UploadEvent, "model_copy", counted)
    arrival._clock = lambda: arrival._told_at
    for nbytes in range(1, 1001):
        arrival.received(nbytes)
    assert (made, len(feed.told)) == (0, 1)
    arrival._clock = lambda: 1e12
    arrival.received(1500)
    arrival.received(2000)
    arrival.accepted("t")
    assert [(one.state, one.received) for one in feed.told] == [
        (UploadState.RECEIVING, 0),
        (UploadState.RECEIVING, 1500),
        (UploadState.ACCEPTED, 2000),
    ]


@pytest.mark.parametrize("body", [{"code": "bad_value"}, {"code": "not_of_this_release"}])
async def test_an_answer_of_another_release_is_passed_on(body: dict[str, str]) -> None:
    """A stored refusal whose code is not known here is told without it, and is no error of the service."""
    feed = Told()
    arrival = Arrival(feed, None, (None, None), None)
    arrival.answered(Response(json.dumps(body), 422), None)
    last = feed.told[-1]
    assert (last.state, last.code) == (
        UploadState.REFUSED,
        "bad_value" if body["code"] == "bad_value" else None,
    )
