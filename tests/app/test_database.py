"""The ledger's file: made whole, brought up to date, locked, and written in whole transactions."""

import sqlite3
from pathlib import Path

import pytest

from app.database import Database
from app.failpoints import Failpoints
from app.migrations import MIGRATIONS
from schemas.problems import Code, ProblemError

pytestmark = pytest.mark.anyio


def values(path: Path) -> list[str]:
    """What another connection finds in the table of single values."""
    connection = sqlite3.connect(path)
    found = [row[0] for row in connection.execute("SELECT name FROM meta ORDER BY name")]
    connection.close()
    return found


async def opened(path: Path) -> Database:
    """An open database."""
    database = Database(path, Failpoints())
    await database.open()
    return database


async def test_a_new_file_is_complete_and_private(tmp_path: Path) -> None:
    """It has the latest schema and the ledger's id, and nobody else can read it."""
    path = tmp_path / "ledger.sqlite"
    (tmp_path / "ledger.new").write_bytes(b"left over")
    database = await opened(path)
    await database.close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(one.name for one in tmp_path.iterdir()) == ["ledger.sqlite"]
    assert values(path) == ["ledger"]
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    connection.close()


async def test_writes_are_whole_or_not_at_all(tmp_path: Path) -> None:
    """What raises half way leaves nothing; what returned is there after the process is gone."""
    database = await opened(tmp_path / "l")

    def half(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO meta VALUES ('half', '')")
        raise KeyError("half")

    with pytest.raises(KeyError):
        await database.write("x", half)
    await database.write("x", lambda c: c.execute("INSERT INTO meta VALUES ('whole', '')"))
    with pytest.raises(ProblemError, match="ledger_damaged"):
        await database.write("x", lambda c: c.execute("INSERT INTO nothing VALUES (1)"))
    await database.close()
    assert values(tmp_path / "l") == ["ledger", "whole"]


async def test_it_is_as_durable_as_sqlite_can_make_it(tmp_path: Path) -> None:
    """WAL with synchronous FULL, for one process alone."""
    database = await opened(tmp_path / "l")
    for pragma, value in (("journal_mode", "wal"), ("synchronous", 2), ("locking_mode", "exclusive")):
        assert await database.read(lambda c, p=pragma: c.execute(f"PRAGMA {p}").fetchone()) == (value,)
    other = Database(tmp_path / "l", Failpoints())
    with pytest.raises(ProblemError) as caught:
        await other.open()
    assert caught.value.code is Code.STATE_IN_USE
    await other.close()
    await database.close()
    await (await opened(tmp_path / "l")).close()


async def test_an_old_schema_is_brought_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later scripts run once, on what is there."""
    await (await opened(tmp_path / "l")).close()
    script = "CREATE TABLE later (a TEXT); INSERT INTO later SELECT name FROM meta"
    monkeypatch.setattr("app.database.MIGRATIONS", (*MIGRATIONS, script))
    for _ in range(2):
        database = await opened(tmp_path / "l")
        assert await database.read(lambda c: c.execute("SELECT a FROM later").fetchall()) == [("ledger",)]
        await database.close()


async def test_a_migration_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old Graft can still read what a new one could not bring up to date."""
    await (await opened(tmp_path / "l")).close()
    monkeypatch.setattr("app.database.MIGRATIONS", (*MIGRATIONS, "CREATE TABLE later (a TEXT); nonsense"))
    with pytest.raises(ProblemError, match="ledger_damaged"):
        await opened(tmp_path / "l")
    monkeypatch.undo()
    await (await opened(tmp_path / "l")).close()
