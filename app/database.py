"""The ledger's SQLite file: opened by one process at a time, written durably, never on the event loop."""

import asyncio
import os
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from app.failpoints import Failpoints
from app.migrations import MIGRATIONS
from loaders.staged import fsync_path, refuse_full_disk
from schemas.problems import Code, ProblemError

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

_LOCK_WAIT_S = 1.0


class Database:
    """One connection, used from a thread of its own. Making it touches no disk.

    A write is one SQLite transaction, on disk before the method returns (WAL, synchronous
    FULL). All methods raise `disk_full` with nothing written, or `ledger_damaged`.
    """

    def __init__(self, path: Path, failpoints: Failpoints) -> None:
        self._path = path
        self._failpoints = failpoints
        self._connection: sqlite3.Connection | None = None
        self._thread: ThreadPoolExecutor | None = None

    async def open(self) -> None:
        """Open the file, made anew if there is none, and bring its schema up to date.

        The file stays locked until it is closed or the process ends, however it ends.
        Raises `state_in_use` if another process has it open.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="graft-ledger")
        self._connection = await self._do(self._open)

    async def close(self) -> None:
        """Close the file; fine if it is not open."""
        if self._thread is not None:
            if self._connection is not None:
                await self._do(self._connection.close)
            self._thread.shutdown(wait=False)
        self._thread = self._connection = None

    async def read(self, work: Work[T]) -> T:
        """What `work` finds."""
        return await self._do(lambda: self._read(work))

    async def write(self, step: str, work: Work[T]) -> T:
        """Run `work` as one transaction; `step` names its failpoints."""
        return await self._do(lambda: self._write(step, work))

    async def _do(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            raise ProblemError(Code.LEDGER_DAMAGED, "The ledger is not open.")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @property
    def _open_connection(self) -> sqlite3.Connection:
        if self._connection is None:
            raise ProblemError(Code.LEDGER_DAMAGED, "The ledger could not be opened.")
        return self._connection

    def _read(self, work: Work[T]) -> T:
        with _translated():
            return work(self._open_connection)

    def _write(self, step: str, work: Work[T]) -> T:
        with _translated(), refuse_full_disk():
            self._failpoints.reach(f"{step}.before")
            with _transaction(self._open_connection) as connection:
                result = work(connection)
                self._failpoints.reach(f"{step}.within")
        self._failpoints.reach(f"{step}.after")
        return result

    def _open(self) -> sqlite3.Connection:
        with _translated(), refuse_full_disk():
            if not self._path.exists():
                self._create()
            elif self._path.stat().st_size == 0:
                raise ProblemError(Code.LEDGER_DAMAGED, f"{self._path.name} is empty.")
            connection = _connect(self._path)
            try:
                connection.execute("PRAGMA locking_mode = EXCLUSIVE")
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                _check(connection, self._path.name)
                _migrate(connection)
            except BaseException:
                connection.close()
                raise
            return connection

    def _create(self) -> None:
        """A file that is there is complete: an empty one never means a new ledger."""
        draft = self._path.with_suffix(".new")
        draft.unlink(missing_ok=True)
        with _closing(_connect(draft)) as connection:
            _migrate(connection)
            with _transaction(connection):
                connection.execute("INSERT INTO meta VALUES ('ledger', ?)", (uuid.uuid4().hex,))
        fsync_path(draft)
        self._failpoints.reach("ledger.create")
        draft.rename(self._path)
        fsync_path(self._path.parent)


def _connect(path: Path) -> sqlite3.Connection:
    # Created private, since sqlite3 itself would go by the umask.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return sqlite3.connect(path, timeout=_LOCK_WAIT_S, isolation_level=None, check_same_thread=False)


@contextmanager
def _closing(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            with suppress(sqlite3.Error):  # the first fault is the one to tell
                connection.execute("ROLLBACK")
        raise


def _check(connection: sqlite3.Connection, name: str) -> None:
    """Raises ledger_damaged if this is no ledger, or one of a later Graft."""
    faults = [row[0] for row in connection.execute("PRAGMA quick_check(3)")]
    if faults != ["ok"]:
        raise ProblemError(Code.LEDGER_DAMAGED, f"{name} is damaged.")
    known = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()[0]
    number = connection.execute("PRAGMA user_version").fetchone()[0]
    if not known or number < 1:
        raise ProblemError(Code.LEDGER_DAMAGED, f"{name} is not a ledger.")
    if number > len(MIGRATIONS):
        raise ProblemError(Code.LEDGER_DAMAGED, f"{name} was written by a later version of Graft.")


def _migrate(connection: sqlite3.Connection) -> None:
    number = connection.execute("PRAGMA user_version").fetchone()[0]
    for place, script in enumerate(MIGRATIONS[number:], number + 1):
        with _transaction(connection):
            for statement in script.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {place}")


@contextmanager
def _translated() -> Iterator[None]:
    """Turn SQLite's faults into refusals."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise ProblemError(Code.DISK_FULL, "There is no room left on the disk for the ledger.") from error
        if code == sqlite3.SQLITE_BUSY:
            raise ProblemError(Code.STATE_IN_USE, "Another process has the ledger open.") from error
        raise ProblemError(Code.LEDGER_DAMAGED, f"The ledger can't be used: {error}.") from error
