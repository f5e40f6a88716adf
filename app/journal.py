"""The ledger on disk: what was meant to be done, what came of it, and what must outlive this process."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from sqlite3 import Connection

from app.database import Database
from app.ledger import BaselineRecord, VersionRecord
from app.records import (
    BaseRecord,
    Intent,
    Loaded,
    Remembered,
    Reply,
    forget_first,
    insert_reply,
    insert_version,
    put_view,
    remembered,
)
from schemas.operations import Operation
from schemas.problems import Code, ProblemError
from schemas.transactions import Transaction

_log = logging.getLogger(__name__)


class Journal:
    """Every method is one durable step: it is on disk when the method returns, or not at all.

    They raise `disk_full` and `ledger_damaged`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.intent: Intent | None = None
        """The change whose outcome is not written yet."""

    async def open(self) -> Remembered:
        """Open the ledger and read all of it. Raises `state_in_use` too."""
        await self._database.open()
        found = await self._database.read(remembered)
        self.intent = found.intent
        return found

    async def close(self) -> None:
        """Close the ledger."""
        await self._database.close()

    async def begin(self, base: BaseRecord, records: Sequence[VersionRecord]) -> None:
        """The history begins with this base."""

        def work(connection: Connection) -> None:
            row = (base.model, base.checkpoint, json.dumps(dict(base.headers)))
            connection.execute("INSERT INTO bases (model, checkpoint, headers) VALUES (?, ?, ?)", row)
            for record in records:
                insert_version(connection, record)

        await self._database.write("base", work)

    async def intend(self, intent: Intent) -> Intent:
        """A change is about to be made."""

        def work(connection: Connection) -> int:
            # One that was cut short just as it was written down: the engine was not asked.
            connection.execute("UPDATE intents SET outcome = 'failed', intent = '' WHERE outcome IS NULL")
            row = (intent.change.version, intent.model_dump_json())
            found = connection.execute("INSERT INTO intents (version, intent) VALUES (?, ?)", row)
            assert found.lastrowid is not None
            return found.lastrowid

        self.intent = intent.model_copy(update={"id": await self._database.write("intent", work)})
        return self.intent

    async def conclude(
        self,
        intent: Intent,
        record: VersionRecord,
        reply: Reply | None,
        views: Sequence[Transaction | Operation],
    ) -> None:
        """The change was made; what is said to whoever asked for it becomes durable with it."""

        def work(connection: Connection) -> None:
            insert_version(connection, record)
            _set_outcome(connection, intent, "done")
            if reply is not None:
                insert_reply(connection, reply)
            for view in views:
                put_view(connection, _table(view), view)

        await self._database.write("outcome", work)
        self.intent = None

    async def abandon(self, intent: Intent, views: Sequence[Transaction | Operation]) -> None:
        """The change was not made, or was undone."""

        def work(connection: Connection) -> None:
            _set_outcome(connection, intent, "failed")
            for view in views:
                put_view(connection, _table(view), view)

        await self._database.write("abandon", work)
        self.intent = None

    async def put_loaded(self, loaded: Loaded) -> None:
        """An engine has proved to have the base."""
        text = json.dumps({"boots": dict(loaded.boots), "stamps": dict(loaded.stamps)})
        await self._database.write(
            "loaded", lambda c: c.execute("INSERT OR REPLACE INTO meta VALUES ('loaded', ?)", (text,))
        )

    async def digests(self, version: int, layout: str) -> Mapping[int, str] | None:
        """The digest of every rank at a version on this kind of engine, if it is known."""
        query = "SELECT ranks FROM digests WHERE version = ? AND layout = ?"
        row = await self._database.read(lambda c: c.execute(query, (version, layout)).fetchone())
        return None if row is None else {int(rank): digest for rank, digest in json.loads(row[0]).items()}

    async def put_digests(self, version: int, layout: str, ranks: Mapping[int, str]) -> None:
        """Remember the digest of every rank at a version."""
        row = (version, layout, json.dumps(dict(ranks)))
        await self._database.write(
            "digests", lambda c: c.execute("INSERT OR REPLACE INTO digests VALUES (?, ?, ?)", row)
        )

    async def put_baseline(self, record: BaselineRecord) -> None:
        """Remember a name."""
        row = (record.name, record.version, record.created_at.isoformat())
        await self._database.write(
            "baseline", lambda c: c.execute("INSERT OR REPLACE INTO baselines VALUES (?, ?, ?)", row)
        )

    async def delete_baseline(self, name: str) -> None:
        """Forget a name."""
        await self._database.write("baseline", lambda c: forget_first(c, "baselines", "name", [name]))

    async def put_reply(self, reply: Reply, forgotten: Iterable[str]) -> None:
        """Remember an answer, and forget those of other keys."""

        def work(connection: Connection) -> None:
            insert_reply(connection, reply)
            forget_first(connection, "replies", "key", forgotten)

        await self._database.write("reply", work)

    async def put(
        self, views: Sequence[Transaction | Operation], forgotten: Sequence[Transaction | Operation] = ()
    ) -> None:
        """Remember transactions and operations as they stand, and forget others."""

        def work(connection: Connection) -> None:
            for view in views:
                put_view(connection, _table(view), view)
            for view in forgotten:
                forget_first(connection, _table(view), "id", [view.id])

        await self._database.write("view", work)

    async def try_put(self, views: Sequence[Transaction | Operation]) -> None:
        """Remember these if there is room; if not, a restart knows less of them, and nothing else is lost."""
        try:
            await self.put(views)
        except ProblemError as error:
            if error.code is not Code.DISK_FULL:
                raise
            _log.warning("the disk is full: %s", ", ".join(view.id for view in views))


def _table(view: Transaction | Operation) -> str:
    return "transactions" if isinstance(view, Transaction) else "operations"


def _set_outcome(connection: Connection, intent: Intent, outcome: str) -> None:
    # What it was about stands with the version from now on, or is of no more use.
    connection.execute(
        "UPDATE intents SET outcome = ?, intent = '' WHERE id = ? AND outcome IS NULL", (outcome, intent.id)
    )
