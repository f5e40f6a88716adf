"""Numbers for Prometheus; every app has its own registry."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from schemas.problems import ProblemError


class Metrics:
    """Counts as things happen; gauges are set when they are asked for."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._changes = Counter(
            "graft_changes",
            "Commits, rollbacks and reloads, by how they ended",
            ["kind", "code"],
            registry=self._registry,
        )
        self._paused = Histogram(
            "graft_pause_seconds",
            "How long generation stood still for a change",
            buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
            registry=self._registry,
        )
        self._uploads = Counter("graft_uploads", "Accepted uploads", ["kind"], registry=self._registry)
        self._upload_bytes = Counter(
            "graft_upload_bytes", "Bytes of accepted uploads", registry=self._registry
        )
        self._gauges = {
            name: Gauge(f"graft_{name}", text, registry=self._registry)
            for name, text in (
                ("version", "The current version"),
                ("open_transactions", "Transactions that have not ended"),
                ("staged_bytes", "Bytes of uploads of open transactions"),
                ("undo_bytes", "Bytes of undo that the engine holds per rank"),
                ("kept_bytes", "Bytes of uploads that committed versions need"),
                ("engine_up", "Whether the engine answered last time"),
                ("state_unknown", "Whether the state of the engine's weights is unknown"),
            )
        }

    @contextmanager
    def change(self, kind: str) -> Iterator[None]:
        """Count a commit or rollback under the code that it ends with."""
        try:
            yield
        except ProblemError as error:
            self._changes.labels(kind, error.code).inc()
            raise
        self._changes.labels(kind, "done").inc()

    def paused(self, milliseconds: float) -> None:
        """Note how long generation stood still."""
        self._paused.observe(milliseconds / 1000)

    def uploaded(self, kind: str, nbytes: int) -> None:
        """Count an accepted upload."""
        self._uploads.labels(kind).inc()
        self._upload_bytes.inc(nbytes)

    def render(self, gauges: Mapping[str, float]) -> bytes:
        """The text format, with `gauges` as they are now."""
        for name, value in gauges.items():
            self._gauges[name].set(value)
        return generate_latest(self._registry)
