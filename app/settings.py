"""Every knob of the admin service, read from `GRAFT_…` variables."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bytes = Annotated[ByteSize, Field(gt=0)]


class LogFormat(StrEnum):
    """How lines of the log are written; `auto`: text on a terminal, else JSON."""

    AUTO = "auto"
    JSON = "json"
    TEXT = "text"


class Settings(BaseSettings):
    """Limits in bytes (`8GiB` works too), times in seconds. Reading them touches no disk."""

    model_config = SettingsConfigDict(
        env_prefix="GRAFT_", frozen=True, extra="ignore", use_attribute_docstrings=True
    )

    host: str = "127.0.0.1"
    """Where the admin listens; elsewhere than on loopback only with a token."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8001
    """Port of the admin."""
    state_dir: Path = Path(".graft")
    """Ledger, uploads and read-backs; must be readable and writable by the engine too."""

    engine_url: str = "http://127.0.0.1:8000"
    """Where the engine is."""
    engine_secret_file: Path | None = None
    """Shared with the engine's bridge; read again each time the engine is looked for."""

    token: SecretStr | None = None
    """What clients have to send as `Authorization: Bearer …`."""
    token_file: Path | None = None
    """A file that holds it."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names accepted beside the loopback ones; as JSON in the environment."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may send requests; as JSON in the environment."""

    log_format: LogFormat = LogFormat.AUTO
    """Of standard error. With `json`, what is said to a person on standard output goes there too."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What is less than this is not written."""

    body_bytes: Bytes = ByteSize(16 * GIB)
    """Largest upload."""
    header_bytes: Bytes = ByteSize(32 * MIB)
    """Largest safetensors header."""
    json_bytes: Bytes = ByteSize(64 * KIB)
    """Largest JSON body."""
    staged_bytes: Bytes = ByteSize(64 * GIB)
    """All uploads of open transactions together."""
    undo_bytes: Bytes = ByteSize(16 * GIB)
    """Undo that the engine holds, per rank."""
    blob_bytes: Bytes = ByteSize(256 * GIB)
    """Uploads of committed versions, kept to rebuild these; those that nothing needs go, oldest first."""
    kept_versions: Annotated[int, Field(gt=0)] = 256
    """Of how many different versions, at most, the uploads are kept beside those that must be."""

    reload_roots: tuple[Path, ...] = ()
    """Folders below which reload may read, as JSON in the environment; none: the served model's own
    folder and the one that it is in."""
    export_roots: tuple[Path, ...] = ()
    """Folders below which exports may be written; none: as for reload."""

    body_idle_s: Seconds = 30
    """Longest silence within an upload."""
    body_total_s: Seconds = 3600
    """Longest time that an upload may take."""
    json_s: Seconds = 15
    """Longest time that a JSON body may take."""

    engine_connect_s: Seconds = 10
    """Within this time a connection to the engine is made."""
    engine_probe_s: Seconds = 2
    """Within this time a ready engine answers."""
    engine_answer_s: Seconds = 30
    """Bound on small requests that a commit depends on; they run between two steps of the engine."""
    engine_read_s: Seconds = 300
    """Bound on read-backs and digests."""
    engine_prepare_s: Seconds = 600
    """Bound on phase one; the engine is told to give up after nine tenths of it."""
    engine_commit_s: Seconds = 300
    """Bound on phase two, beside the wait for running requests."""
    drain_s: Annotated[float, Field(gt=0, le=3600)] = 60
    """How long `in_flight=wait` waits for running requests to end, unless a request says otherwise."""
    engine_settle_s: Seconds = 20
    """How long to look for the outcome of a commit whose answer was lost."""
    engine_hang_s: Seconds = 300
    """How long an engine that `graft serve` has started may answer nothing, outside of a commit, before it is
    taken for hung and replaced."""
    engine_seek_s: Seconds = 0.5
    """How often an engine that is not there is looked for."""
    engine_poll_s: Seconds = 5
    """How often the engine is asked whether it is still the same; each question keeps vLLM's workers
    spinning for a second."""

    transaction_s: Seconds = 3600
    """How long a transaction stays open unless it says otherwise."""
    transaction_max_s: Seconds = 7 * 24 * 3600
    """How long a transaction may ask to stay open."""
    sweep_s: Seconds = 1
    """How often expired transactions are looked for."""
    open_transactions: Annotated[int, Field(gt=0)] = 1000
    """How many transactions may be open at once."""
    ended_transactions: Annotated[int, Field(gt=0)] = 1000
    """How many ended transactions stay readable."""
    idempotency_keys: Annotated[int, Field(gt=0)] = 10_000
    """How many answers are kept for repeated requests."""
    operations: Annotated[int, Field(gt=0)] = 1000
    """How many ended operations stay readable."""

    event_backlog: Annotated[int, Field(gt=0)] = 1000
    """How many events are kept for readers that come back or are slow; about a kilobyte each."""
    event_readers: Annotated[int, Field(gt=0)] = 64
    """How many streams of events may be open."""
    event_beat_s: Seconds = 15
    """How long a stream of events may be silent before it says so; clients bear 45 s."""
    event_look_s: Seconds = 0.25
    """How often engine and budgets are compared with what readers of events were told."""

    @property
    def staged_dir(self) -> Path:
        """Where uploads are received; absolute, since the engine opens files there."""
        return self.state_dir.absolute() / "staged"

    @property
    def blob_dir(self) -> Path:
        """Where uploads of committed versions are kept, named by their digests."""
        return self.state_dir.absolute() / "blobs"

    @property
    def ledger_file(self) -> Path:
        """The ledger's database."""
        return self.state_dir.absolute() / "ledger.sqlite"

    @property
    def read_dir(self) -> Path:
        """Where the engine writes read-backs."""
        return self.state_dir.absolute() / "read"
