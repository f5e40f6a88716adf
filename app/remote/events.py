"""What happens to a service, as it happens. The only place that knows where events come from."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from pydantic import Field

from app.remote.errors import GraftError, Refused
from app.remote.waiting import Client
from schemas.base import Output
from schemas.status import Status


class Event(Output):
    """Something that happened."""

    kind: str
    """`version`, `engine`, `busy`, `transactions` or `unreachable`."""
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    detail: str
    data: dict[str, Any] = Field(default_factory=dict)


def events(client: Client, every_s: float) -> Iterator[Event]:
    """Events without end, the state at the start first.

    The service is asked for its status every `every_s` seconds; what comes and goes in between is missed, but
    for versions. Raises Refused if the service does not want to tell.
    """
    last: Status | None = None
    silent = False
    while True:
        try:
            now = client.status()
            yield from _between(client, last, now)
            last, silent = now, False
        except Refused:
            raise
        except GraftError as error:
            if not silent:
                yield Event(kind="unreachable", detail=str(error))
            last, silent = None, True
        time.sleep(every_s)


def _between(client: Client, last: Status | None, now: Status) -> Iterator[Event]:
    """What must have happened between two states."""
    if last is None or last.version != now.version:
        yield from _versions(client, last, now)
    if last is None or (last.writable, last.engine.problem) != (now.writable, now.engine.problem):
        engine = now.engine.model_dump(mode="json", include={"url", "reachable", "problem", "paused"})
        detail = "writable" if now.writable else f"not writable: {now.engine.problem}"
        yield Event(kind="engine", detail=detail, data=engine)
    if last is not None and last.busy != now.busy:
        yield Event(kind="busy", detail="a change is under way" if now.busy else "idle")
    if last is not None and last.open_transactions != now.open_transactions:
        ids = list(now.open_transactions)
        yield Event(kind="transactions", detail=f"{len(ids)} open", data={"open": ids})


def _versions(client: Client, last: Status | None, now: Status) -> Iterator[Event]:
    """Versions that came, one by one; at the start the current one."""
    known = last.version if last is not None and last.ledger == now.ledger else None
    for entry in client.versions().versions:
        if entry.version > known if known is not None else entry.version == now.version:
            label = f", {entry.label}" if entry.label else ""
            detail = f"version {entry.version}: {entry.kind}{label}"
            yield Event(kind="version", detail=detail, data=entry.model_dump(mode="json"))
