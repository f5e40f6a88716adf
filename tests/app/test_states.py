"""Which ways there are between the states of a transaction."""

from itertools import product

import pytest

from app.feed import Feed
from app.transactions import IDLE, LIVE, Transaction
from schemas.problems import ProblemError
from schemas.transactions import State, TransactionOptions

ENDS = {State.COMMITTED, State.ABORTED, State.FAILED, State.EXPIRED, State.INTERRUPTED}
WAYS = {
    ("open", "preparing"),
    ("open", "aborted"),
    ("open", "expired"),
    ("preparing", "prepared"),
    ("preparing", "open"),
    ("prepared", "preparing"),
    ("prepared", "open"),
    ("prepared", "committing"),
    ("prepared", "aborted"),
    ("prepared", "expired"),
    ("committing", "committed"),
    ("committing", "failed"),
    ("committing", "prepared"),
}


@pytest.mark.parametrize(("old", "new"), list(product(State, State)))
def test_only_these_moves_exist(old: State, new: State) -> None:
    """Every pair of states: a way is either known or refused, and ends stay ends."""
    transaction = Transaction(TransactionOptions(), 60, Feed(10, 1, 15))
    transaction.state = old
    if (old, new) in WAYS:
        transaction.move(new)
        assert transaction.state is new
    else:
        with pytest.raises(ProblemError, match="transaction_state"):
            transaction.move(new)
        assert transaction.state is old


def test_live_and_idle_are_what_they_say() -> None:
    """Live states are those that are no ends; idle ones are those in which nothing runs."""
    assert set(State) - LIVE == ENDS
    assert {State.OPEN, State.PREPARED} == IDLE
