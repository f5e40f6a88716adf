"""What the ledger's tables hold, as values, and how rows become values again."""

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from app.ledger import BaselineRecord, VersionRecord
from app.receipts import Change
from loaders.folder import Stamp
from schemas.base import Output
from schemas.bridge import PrepareResult, StagedUpload
from schemas.operations import Operation
from schemas.transactions import RECOMPUTE, FlightOptions, Receipt, Transaction
from schemas.versions import VersionKind


@dataclass(frozen=True)
class Ticket:
    """A request that wants its first answer again: its idempotency key, and what it asked."""

    key: str
    fingerprint: str


@dataclass(frozen=True)
class Reply:
    """The answer to a request with an idempotency key."""

    key: str
    fingerprint: str
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Intent(Output):
    """A change that is about to be made on the engine: all that is needed to know it by afterwards."""

    change: Change
    key: str
    """Of the prepared work."""
    prepared: PrepareResult
    boots: dict[int, str]
    flight: FlightOptions = RECOMPUTE
    uploads: tuple[StagedUpload, ...] = ()
    ticket: tuple[str, str] | None = None
    """Idempotency key and fingerprint of the request."""
    operation: str | None = None
    id: int = 0
    """Given by the ledger."""


@dataclass(frozen=True)
class BaseRecord:
    """The checkpoint that version 0 was loaded from; `headers` maps file → digest of its header."""

    model: str
    checkpoint: str | None
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Loaded:
    """The engine, by its boot ids, that last proved to have the base, and the stamps of the files then."""

    boots: Mapping[int, str]
    stamps: Mapping[str, Stamp]


@dataclass(frozen=True)
class Remembered:
    """Everything that the ledger holds when it is opened."""

    ledger: str
    base: BaseRecord | None
    loaded: Loaded | None
    versions: tuple[VersionRecord, ...]
    baselines: tuple[BaselineRecord, ...]
    intent: Intent | None
    """A change whose outcome was not written."""
    transactions: tuple[Transaction, ...]
    operations: tuple[Operation, ...]
    replies: tuple[Reply, ...]


def remembered(connection: sqlite3.Connection) -> Remembered:
    """Read all tables."""
    meta = dict(connection.execute("SELECT name, value FROM meta").fetchall())
    return Remembered(
        ledger=meta["ledger"],
        base=_base(connection),
        loaded=_loaded(meta.get("loaded")),
        versions=_versions(connection),
        baselines=tuple(
            BaselineRecord(name, version, datetime.fromisoformat(at))
            for name, version, at in connection.execute("SELECT name, version, created_at FROM baselines")
        ),
        intent=_intent(connection),
        transactions=tuple(
            Transaction.model_validate_json(view)
            for (view,) in connection.execute("SELECT view FROM transactions ORDER BY place")
        ),
        operations=tuple(
            Operation.model_validate_json(view)
            for (view,) in connection.execute("SELECT view FROM operations ORDER BY place")
        ),
        replies=tuple(
            Reply(key, fingerprint, status, tuple((n, v) for n, v in json.loads(headers)), body)
            for key, fingerprint, status, headers, body in connection.execute(
                "SELECT key, fingerprint, status, headers, body FROM replies ORDER BY place"
            )
        ),
    )


def insert_version(connection: sqlite3.Connection, record: VersionRecord) -> None:
    """Add one entry to the history."""
    connection.execute(
        "INSERT INTO versions VALUES (?, ?, ?, ?, ?, (SELECT max(id) FROM bases), ?, ?, ?)",
        (
            record.version,
            str(record.kind),
            record.created_at.isoformat(),
            record.base_version,
            record.restores,
            record.transaction,
            record.label,
            record.receipt.model_dump_json() if record.receipt else None,
        ),
    )
    connection.executemany(
        "INSERT INTO uploads VALUES (?, ?, ?, ?)",
        [(record.version, place, u.blake3, u.model_dump_json()) for place, u in enumerate(record.uploads)],
    )


def insert_reply(connection: sqlite3.Connection, reply: Reply) -> None:
    """Remember an answer."""
    connection.execute(
        "INSERT OR REPLACE INTO replies"
        " VALUES (?, (SELECT ifnull(max(place), 0) + 1 FROM replies), ?, ?, ?, ?)",
        (reply.key, reply.fingerprint, reply.status, json.dumps(reply.headers), reply.body),
    )


def put_view(connection: sqlite3.Connection, table: str, view: Transaction | Operation) -> None:
    """Remember a transaction or operation as it stands."""
    connection.execute(
        f"INSERT INTO {table} VALUES (?, (SELECT ifnull(max(place), 0) + 1 FROM {table}), ?)"  # noqa: S608
        " ON CONFLICT (id) DO UPDATE SET view = excluded.view",
        (view.id, view.model_dump_json()),
    )


def forget_first(connection: sqlite3.Connection, table: str, column: str, names: Iterable[str]) -> None:
    """Forget rows by name."""
    connection.executemany(f"DELETE FROM {table} WHERE {column} = ?", [(n,) for n in names])  # noqa: S608


def _versions(connection: sqlite3.Connection) -> tuple[VersionRecord, ...]:
    uploads: dict[int, list[StagedUpload]] = {}
    for version, staged in connection.execute("SELECT version, staged FROM uploads ORDER BY version, place"):
        uploads.setdefault(version, []).append(StagedUpload.model_validate_json(staged))
    rows = connection.execute(
        "SELECT version, kind, created_at, base_version, restores, transaction_id, label, receipt"
        " FROM versions ORDER BY version"
    )
    return tuple(
        VersionRecord(
            version=version,
            kind=VersionKind(kind),
            created_at=datetime.fromisoformat(at),
            base_version=base,
            restores=restores,
            transaction=transaction,
            label=label,
            receipt=Receipt.model_validate_json(receipt) if receipt else None,
            uploads=tuple(uploads.get(version, ())),
        )
        for version, kind, at, base, restores, transaction, label, receipt in rows
    )


def _base(connection: sqlite3.Connection) -> BaseRecord | None:
    row = connection.execute(
        "SELECT model, checkpoint, headers FROM bases ORDER BY id DESC LIMIT 1"
    ).fetchone()
    return None if row is None else BaseRecord(row[0], row[1], json.loads(row[2]))


def _intent(connection: sqlite3.Connection) -> Intent | None:
    row = connection.execute(
        "SELECT id, intent FROM intents WHERE outcome IS NULL ORDER BY id DESC LIMIT 1"
    ).fetchone()
    return None if row is None else Intent.model_validate_json(row[1]).model_copy(update={"id": row[0]})


def _loaded(text: str | None) -> Loaded | None:
    if text is None:
        return None
    found = json.loads(text)
    stamps = {name: (inode, nbytes, at) for name, (inode, nbytes, at) in found["stamps"].items()}
    return Loaded(_boots(found["boots"]), stamps)


def _boots(found: Mapping[str, str]) -> dict[int, str]:
    return {int(rank): boot for rank, boot in found.items()}
