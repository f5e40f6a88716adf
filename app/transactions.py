"""Transactions: their states, what was uploaded into them, and who is still remembered."""

import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from app.feed import Feed
from app.journal import Journal
from app.logs import event
from app.settings import Settings
from loaders.staged import StagedFile
from schemas import transactions as wire
from schemas.bridge import PrepareResult, StagedUpload
from schemas.events import TransactionEvent
from schemas.problems import Code, Problem, ProblemError
from schemas.transactions import State, TransactionOptions

_log = logging.getLogger(__name__)

_MOVES: dict[State, frozenset[State]] = {
    State.OPEN: frozenset({State.PREPARING, State.ABORTED, State.EXPIRED}),
    State.PREPARING: frozenset({State.PREPARED, State.OPEN}),
    State.PREPARED: frozenset({State.OPEN, State.PREPARING, State.COMMITTING, State.ABORTED, State.EXPIRED}),
    State.COMMITTING: frozenset({State.COMMITTED, State.FAILED, State.PREPARED}),
}
"""Which states can follow which; the others are ends."""

LIVE = frozenset(_MOVES)
"""States of a transaction that has not ended."""
IDLE = frozenset({State.OPEN, State.PREPARED})
"""States in which nothing is being done to it."""


@dataclass(frozen=True)
class Accepted:
    """An upload that was checked: what was said about it, its file, and its writes."""

    upload: wire.Upload
    file: StagedFile
    staged: StagedUpload
    validate_ms: float

    @property
    def place(self) -> tuple[int, int] | None:
        """Layer and expert; none for a batch, which replaces nothing."""
        if self.upload.layer is None or self.upload.expert is None:
            return None
        return self.upload.layer, self.upload.expert


@dataclass(frozen=True)
class Prepared:
    """Phase one, done on every rank under `key` for the version `base`."""

    key: str
    base: int
    result: PrepareResult


class Transaction:
    """One transaction. Only its own methods change it."""

    def __init__(self, options: TransactionOptions, expires_in_s: float, feed: Feed) -> None:
        self._feed = feed
        self.id = secrets.token_hex(8)
        self.options = options
        self.created_at = datetime.now(UTC)
        self.expires_at = self.created_at + timedelta(seconds=expires_in_s)
        self.state = State.OPEN
        self._uploads: dict[int, Accepted] = {}
        """By number, in the order in which they are applied."""
        self._places: dict[tuple[int, int], int] = {}
        """Expert → number of its upload."""
        self.prepared: Prepared | None = None
        self.receipt: wire.Receipt | None = None
        self.problem: Problem | None = None
        self._deadline = time.monotonic() + expires_in_s
        self._accepted = 0
        self._nbytes = 0
        self._taken = False
        self.past: wire.Transaction | None = None
        """What an earlier process knew of it, if it is one of its."""

    @staticmethod
    def of_the_past(view: wire.Transaction, feed: Feed) -> "Transaction":
        """One that an earlier process knew; its files are gone."""
        options = TransactionOptions(
            base_version=view.base_version,
            in_flight=view.in_flight,
            label=view.label,
            allow_nonfinite=view.allow_nonfinite,
        )
        past = Transaction(options, 0, feed)
        past.id, past.state, past.past = view.id, view.state, view
        past.receipt, past.problem = view.receipt, view.problem
        return past

    @property
    def uploads(self) -> list[Accepted]:
        """What was uploaded, in the order in which it is applied."""
        return list(self._uploads.values())

    @property
    def overdue(self) -> bool:
        """Whether it is time to let it expire."""
        return self.state in IDLE and time.monotonic() >= self._deadline

    def require(self, allowed: Iterable[State]) -> None:
        """Raises transaction_expired or transaction_state unless in one of the `allowed` states."""
        if self.state is State.INTERRUPTED:
            raise ProblemError(Code.INTERRUPTED, "The service was restarted; open a new transaction.")
        if self.state is State.EXPIRED or self.overdue:
            raise ProblemError(Code.TRANSACTION_EXPIRED, "Open a new transaction.")
        if self.state not in allowed:
            raise ProblemError(Code.TRANSACTION_STATE, f"The transaction is {self.state}.", state=self.state)

    def require_content(self) -> None:
        """Raises nothing_to_apply if nothing was uploaded."""
        if not self._uploads:
            raise ProblemError(Code.NOTHING_TO_APPLY, "Nothing was uploaded into this transaction.")

    def move(self, state: State) -> None:
        """Go to `state`; raises transaction_state if there is no such way."""
        if state not in _MOVES.get(self.state, ()):
            raise ProblemError(
                Code.TRANSACTION_STATE, f"The transaction is {self.state}, not ready to be {state}."
            )
        self.state = state
        self.tell()

    def turn_out(self, state: State, receipt: wire.Receipt | None, problem: Problem | None) -> None:
        """How a commit ended, as the ledger now says; what was thought of it before does not count."""
        if self.state not in (State.COMMITTING, State.FAILED):
            raise ValueError(f"a transaction that is {self.state} has no commit to turn out")
        self.state, self.receipt, self.problem = state, receipt, problem
        self.tell()

    def add(self, accepted: Accepted) -> tuple[wire.Upload, list[StagedFile]]:
        """Put an upload last; what was said about it, and files that are no longer needed.

        An upload of the same expert is replaced. Prepared work is void afterwards.
        """
        self.require(IDLE)
        replaced = self._take_out(accepted.place)
        self._accepted += 1
        upload = accepted.upload.model_copy(update={"number": self._accepted})
        placed = Accepted(upload, accepted.file, accepted.staged, accepted.validate_ms)
        self._uploads[self._accepted] = placed
        if placed.place is not None:
            self._places[placed.place] = self._accepted
        self._nbytes += upload.nbytes
        self.prepared = None  # even if the engine should fail to drop it, it is not this transaction any more
        self.state = State.OPEN
        self.tell()
        return upload, [old.file for old in replaced]

    def _take_out(self, place: tuple[int, int] | None) -> list[Accepted]:
        """The upload of that expert, if there is one, which is not part of this any more."""
        number = None if place is None else self._places.get(place)
        if number is None:
            return []
        old = self._uploads.pop(number)
        self._nbytes -= old.upload.nbytes
        return [old]

    def take_files(self) -> list[StagedFile]:
        """The staged files, which are the caller's to delete now; none if they were taken before."""
        if self.state in LIVE:
            raise ValueError("a live transaction needs its files")
        files = [] if self._taken else [one.file for one in self.uploads]
        self._taken = True
        self._uploads = {
            number: Accepted(one.upload, one.file, _emptied(one.staged), 0.0)
            for number, one in self._uploads.items()
        }
        return files

    def tell(self) -> None:
        """Tell the feed how it stands."""
        self._feed.publish(
            TransactionEvent(
                id=self.id,
                state=self.state,
                label=self.options.label,
                created_at=self.past.created_at if self.past else self.created_at,
                expires_at=self.past.expires_at if self.past else self.expires_at,
                uploads=len(self.past.uploads if self.past else self.uploads),
                nbytes=self.past.nbytes if self.past else self._nbytes,
                version=self.receipt.version if self.receipt else None,
                problem=self.problem,
            )
        )

    def view(self) -> wire.Transaction:
        """The transaction on the wire."""
        if self.past is not None:
            update = {"state": self.state, "receipt": self.receipt, "problem": self.problem}
            return self.past.model_copy(update=update)
        return wire.Transaction(
            id=self.id,
            state=State.EXPIRED if self.overdue else self.state,
            label=self.options.label,
            base_version=self.options.base_version,
            in_flight=self.options.in_flight,
            allow_nonfinite=self.options.allow_nonfinite,
            created_at=self.created_at,
            expires_at=self.expires_at,
            nbytes=self._nbytes,
            uploads=tuple(one.upload for one in self.uploads),
            preparation=None if self.prepared is None else preparation(self.prepared),
            receipt=self.receipt,
            problem=self.problem,
        )


class Transactions:
    """All transactions that are live, and the latest of those that have ended."""

    def __init__(self, settings: Settings, journal: Journal, feed: Feed) -> None:
        self._feed = feed
        self._settings = settings
        self._journal = journal
        self._all: dict[str, Transaction] = {}

    async def begin(self, views: Iterable[wire.Transaction], in_doubt: str | None) -> None:
        """Take over what an earlier process left: what was open is interrupted, but for `in_doubt`."""
        past = [Transaction.of_the_past(view, self._feed) for view in views]
        self._all = {one.id: one for one in past}
        live = self.live()
        for one in live:
            one.state = State.COMMITTING if one.id == in_doubt else State.INTERRUPTED
        if live:
            await self._journal.try_put([one.view() for one in live])

    def check(self, options: TransactionOptions) -> float:
        """How long such a transaction stays open; raises bad_value, staged_budget."""
        expires_in_s = options.expires_in_s or self._settings.transaction_s
        if expires_in_s > self._settings.transaction_max_s:
            detail = f"expires_in_s is at most {self._settings.transaction_max_s:g}."
            raise ProblemError(Code.BAD_VALUE, detail)
        if len(self.live()) >= self._settings.open_transactions:
            raise ProblemError(Code.STAGED_BUDGET, "Too many transactions are open; commit or abort some.")
        return expires_in_s

    async def open(self, options: TransactionOptions) -> Transaction:
        """A new transaction; raises what `check` does, and disk_full."""
        transaction = Transaction(options, self.check(options), self._feed)
        ended = [one for one in self._all.values() if one.state not in LIVE]
        forgotten = ended[: max(0, len(ended) - self._settings.ended_transactions)]
        self._all[transaction.id] = transaction
        try:
            await self._journal.put([transaction.view()], [one.view() for one in forgotten])
        except BaseException:
            del self._all[transaction.id]
            raise
        for one in forgotten:
            self._all.pop(one.id, None)
        event(_log, logging.INFO, "transaction opened", transaction=transaction.id)
        transaction.tell()
        return transaction

    async def note_end(self, transaction: Transaction) -> None:
        """Remember how one ended, beyond this process if that can be."""
        await self._journal.try_put([transaction.view()])

    def find(self, id: str | None) -> Transaction | None:
        """One transaction, if it is remembered."""
        return None if id is None else self._all.get(id)

    def get(self, id: str) -> Transaction:
        """One transaction; raises unknown_transaction."""
        if id not in self._all:
            raise ProblemError(Code.UNKNOWN_TRANSACTION, "There is no transaction of this id, or no longer.")
        return self._all[id]

    def all(self) -> list[Transaction]:
        """Every one that is remembered, oldest first."""
        return list(self._all.values())

    def live(self) -> list[Transaction]:
        """Those that have not ended."""
        return [one for one in self._all.values() if one.state in LIVE]


def preparation(prepared: Prepared) -> wire.Preparation:
    """What phase one found, on the wire."""
    ranks = prepared.result.ranks
    return wire.Preparation(
        version=prepared.base,
        prepare_ms=prepared.result.prepare_ms,
        nbytes=sum(rank.nbytes for rank in ranks),
        undo_nbytes=max((rank.undo_nbytes for rank in ranks), default=0),
        ranks=tuple(wire.RankWork.model_validate(rank, from_attributes=True) for rank in ranks),
    )


def _emptied(staged: StagedUpload) -> StagedUpload:
    """Without its writes, which can be many and are of no use once the file is gone."""
    return staged.model_copy(update={"writes": ()})
