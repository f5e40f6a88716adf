"""`graft watch`'s lines, where a real service seldom leads."""

from datetime import UTC, datetime, timedelta
from typing import Any, cast

from app.commands.news import News
from app.remote.errors import Unreachable
from app.remote.waiting import Client
from schemas.events import EngineEvent, Event, ResetEvent, TransactionEvent, VersionEvent
from schemas.status import EngineStatus, Progress, Room, Rooms, Status
from schemas.transactions import State
from schemas.versions import VersionEntry, VersionKind, VersionList

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Service:
    """What is read after a reset, if anybody answers."""

    def __init__(self) -> None:
        self.answers = True
        self.ledger = "a"
        self.versions_: list[VersionEntry] = [entry(0)]

    def status(self) -> Status:
        if not self.answers:
            raise Unreachable("gone")
        room = Room(used=0, budget=1)
        return Status(
            ledger=self.ledger,
            version=0,
            checkpoint=None,
            writable=True,
            busy=False,
            open_transactions=(),
            storage=Rooms(staged=room, undo=room),
            engine=EngineStatus(url="u", reachable=True),
        )

    def versions(self) -> VersionList:
        latest = self.versions_[-1].version
        return VersionList(ledger=self.ledger, current=latest, versions=tuple(self.versions_))


def entry(version: int, created_at: datetime = NOW) -> VersionEntry:
    """A version of which nothing else is known."""
    kind = VersionKind.COMMIT if version else VersionKind.BASE
    return VersionEntry(version=version, kind=kind, created_at=created_at, held=True, undo_nbytes=0)


def transaction(state: State, **members: Any) -> TransactionEvent:
    """A transaction in this state."""
    empty = {"label": None, "uploads": 0, "nbytes": 0, "version": None, "problem": None}
    return TransactionEvent(id="t", state=state, created_at=NOW, expires_at=NOW, **{**empty, **members})


def said(service: Service, *events: Event) -> list[str]:
    """All lines, without the columns' width."""
    news = News(cast(Client, service))
    return [" ".join(line.split()) for event in events for _, line in news.lines(event)]


def test_a_state_that_could_not_be_read_is_read_with_the_next_event() -> None:
    """Nothing is said twice: a version that is told meanwhile stands in what is read later."""
    service = Service()
    news = News(cast(Client, service))
    service.answers = False
    service.versions_.append(entry(1))
    assert list(news.lines(ResetEvent())) == []
    assert list(news.lines(VersionEvent(version=entry(1)))) == []
    service.answers = True
    lines = [" ".join(line.split()) for _, line in news.lines(VersionEvent(version=entry(1)))]
    assert lines == ["version 1: commit", "engine writable"]


def test_a_history_that_begins_anew_is_not_taken_for_the_old_one() -> None:
    """Another ledger: its current version is told, though the number is lower."""
    service = Service()
    service.versions_ += [entry(1), entry(2)]
    news = News(cast(Client, service))
    list(news.lines(ResetEvent()))
    service.ledger, service.versions_ = "b", [entry(0)]
    assert [line.split()[1] for _, line in news.lines(ResetEvent())] == ["0:", "writable"]


def test_each_line_has_the_time_of_what_it_says() -> None:
    """Not when it was heard of: a version's own time, also if it is read after a reset; else the event's."""
    service = Service()
    long_ago, reset, later = (NOW - timedelta(days=days) for days in (3, 2, 1))
    service.versions_ = [entry(0, long_ago)]
    news = News(cast(Client, service))
    events: tuple[Event, ...] = (ResetEvent(at=reset), transaction(State.OPEN, at=later))
    said = [(at, line.split()[0]) for event in events for at, line in news.lines(event)]
    assert said == [(long_ago, "version"), (reset, "engine"), (later, "transaction")]


def test_each_step_is_said_once() -> None:
    """Only begin and end of a transaction; of an engine's start each phase, not its seconds or its detail."""
    assert said(
        Service(),
        *(transaction(state) for state in (State.OPEN, State.OPEN, State.PREPARING, State.COMMITTING)),
        transaction(State.COMMITTED, version=3),
        transaction(State.PREPARED),
        transaction(State.EXPIRED),
    ) == ["transaction t: opened", "transaction t: committed as version 3", "transaction t: expired"]

    def starting(phase: str, detail: str) -> EngineEvent:
        progress = Progress(phase=phase, detail=detail, elapsed_s=1)
        engine = EngineStatus(url="u", reachable=False, problem="starting", progress=progress)
        return EngineEvent(writable=False, busy=False, engine=engine)

    assert said(Service(), starting("loading", "1"), starting("loading", "2"), starting("proving", "1")) == [
        "engine not writable: starting (loading)",
        "engine not writable: starting (proving)",
    ]
