"""What transactions of both clients know of themselves."""

from app.remote.call import Call
from app.remote.errors import GraftError, Refused
from schemas.problems import Code
from schemas.transactions import Receipt, Transaction


class Opened:
    """The id of a transaction once there is one, and how it ended."""

    def __init__(self, opening: Call[Transaction]) -> None:
        self._opening = opening
        self._id: str | None = None
        self._receipt: Receipt | None = None
        self._aborted = False

    @property
    def id(self) -> str:
        """Its id; raises RuntimeError outside of `with`."""
        if self._id is None:
            raise RuntimeError("a transaction is opened by `with`")
        return self._id

    @property
    def receipt(self) -> Receipt:
        """What the commit did; raises RuntimeError before it."""
        if self._receipt is None:
            raise RuntimeError("the transaction is not committed")
        return self._receipt

    @property
    def ended(self) -> bool:
        """Whether it is committed or aborted."""
        return self._receipt is not None or self._aborted

    def _left_open(self, error: BaseException, why: GraftError) -> None:
        """Say beside the reason to abort that this could not be done either, and what may become of it."""
        under_way = isinstance(why, Refused) and why.code == Code.TRANSACTION_STATE
        then = "it may still become a version" if under_way else "it ends when it expires"
        error.add_note(f"transaction {self.id} could not be aborted, {then}: {why}")
