"""The ledger's schema: each script takes the database from its number to the next."""

MIGRATIONS = (
    """
    CREATE TABLE meta (
        name TEXT PRIMARY KEY,
        value TEXT NOT NULL
    ) STRICT;
    CREATE TABLE bases (
        id INTEGER PRIMARY KEY,
        model TEXT NOT NULL,
        checkpoint TEXT,
        headers TEXT NOT NULL
    ) STRICT;
    CREATE TABLE versions (
        version INTEGER PRIMARY KEY,
        kind TEXT NOT NULL,
        created_at TEXT NOT NULL,
        base_version INTEGER,
        restores INTEGER,
        base INTEGER REFERENCES bases,
        transaction_id TEXT,
        label TEXT,
        receipt TEXT
    ) STRICT;
    CREATE TABLE uploads (
        version INTEGER NOT NULL REFERENCES versions,
        place INTEGER NOT NULL,
        blake3 TEXT NOT NULL,
        staged TEXT NOT NULL,
        PRIMARY KEY (version, place)
    ) STRICT;
    CREATE TABLE digests (
        version INTEGER NOT NULL,
        layout TEXT NOT NULL,
        ranks TEXT NOT NULL,
        PRIMARY KEY (version, layout)
    ) STRICT;
    CREATE TABLE baselines (
        name TEXT PRIMARY KEY,
        version INTEGER NOT NULL REFERENCES versions,
        created_at TEXT NOT NULL
    ) STRICT;
    CREATE TABLE intents (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        version INTEGER NOT NULL,
        outcome TEXT,
        intent TEXT NOT NULL
    ) STRICT;
    CREATE TABLE transactions (
        id TEXT PRIMARY KEY,
        place INTEGER NOT NULL UNIQUE,
        view TEXT NOT NULL
    ) STRICT;
    CREATE TABLE operations (
        id TEXT PRIMARY KEY,
        place INTEGER NOT NULL UNIQUE,
        view TEXT NOT NULL
    ) STRICT;
    CREATE TABLE replies (
        key TEXT PRIMARY KEY,
        place INTEGER NOT NULL UNIQUE,
        fingerprint TEXT NOT NULL,
        status INTEGER NOT NULL,
        headers TEXT NOT NULL,
        body BLOB NOT NULL
    ) STRICT;
    """,
)
