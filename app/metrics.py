"""Numbers for Prometheus; every app has its own registry."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)

from schemas.problems import Code, ProblemError
from schemas.transactions import Receipt, UploadKind

DONE = "done"
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
_SHARES = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)

GAUGES = {
    "version": "The current version",
    "versions": "Versions in the history",
    "versions_held": "Versions that can be gone back to",
    "open_transactions": "Transactions that have not ended",
    "staged_bytes": "Bytes of uploads of open transactions",
    "staged_budget_bytes": "Bytes that these may take",
    "undo_bytes": "Bytes of undo that the engine holds, on the rank that holds most",
    "undo_budget_bytes": "Bytes that undo may take per rank",
    "blob_bytes": "Bytes of uploads that committed versions are made of",
    "blob_budget_bytes": "Bytes that these may take",
    "engine_up": "1 if the engine answered when it was last asked",
    "engine_silent_seconds": "For how long the engine has answered nothing that it was asked",
    "writable": "1 if the engine was found at the current version and can be changed",
    "state_unknown": "1 if the state of the engine's weights is unknown",
}
"""Read when they are asked for: name without `graft_` → meaning."""


class Metrics:
    """Counts as things happen; gauges are set when they are asked for."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._changes = self._counter(
            "changes",
            "Commits, rollbacks and reloads, by `done` or the code of their refusal",
            "kind",
            "code",
        )
        self._stall = self._histogram(
            "stall_seconds", "How long generation stood still for a change", _SECONDS
        )
        self._prepare = self._histogram(
            "prepare_seconds", "How long phase one took, while the engine served", _SECONDS
        )
        self._density = self._histogram(
            "upload_density", "Share of the elements of its tensors that an upload writes", _SHARES
        )
        self._uploads = self._counter("uploads", "Accepted uploads", "kind")
        self._uploaded = self._counter("uploaded_bytes", "Bytes of accepted uploads")
        self._written = self._counter("written_bytes", "Bytes written to weights by changes, over all ranks")
        self._requests = self._counter(
            "requests", "Answered requests, by route as in /openapi.json", "method", "route", "status"
        )
        self._refusals = self._counter("refusals", "Requests that were refused, by code", "code")
        self._gauges = {
            name: Gauge(f"graft_{name}", text, registry=self.registry) for name, text in GAUGES.items()
        }
        Info("graft_build", "Version of Graft", registry=self.registry).info(
            {"version": version("graft-vllm")}
        )
        ProcessCollector(registry=self.registry)
        self._begin()

    def _begin(self) -> None:
        """What can happen is 0 before it does: rates see the first time, too."""
        for code in Code:
            self._refusals.labels(code)
        for kind in ("commit", "rollback", "reload"):
            for end in (DONE, Code.PREPARE_FAILED, Code.COMMIT_UNDONE, Code.STATE_UNKNOWN):
                self._changes.labels(kind, end)
        for upload in UploadKind:
            self._uploads.labels(upload)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"graft_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"graft_{name}", text, buckets=buckets, registry=self.registry)

    @contextmanager
    def change(self, kind: str) -> Iterator[None]:
        """Count a commit, rollback or reload under the code that it ends with."""
        try:
            yield
        except ProblemError as error:
            self._changes.labels(kind, error.code).inc()
            raise
        self._changes.labels(kind, DONE).inc()

    def prepared(self, milliseconds: float) -> None:
        """Note how long phase one took."""
        self._prepare.observe(milliseconds / 1000)

    def changed(self, receipt: Receipt) -> None:
        """Note how long generation stood still, and what was written meanwhile."""
        timing = receipt.timing
        self._stall.observe((timing.pause_ms + timing.apply_ms + timing.resume_ms) / 1000)
        self._written.inc(receipt.nbytes.written)

    def uploaded(self, kind: str, nbytes: int, density: float) -> None:
        """Count an accepted upload."""
        self._uploads.labels(kind).inc()
        self._uploaded.inc(nbytes)
        self._density.observe(density)

    def answered(self, method: str, route: str, status: int | None, code: str | None) -> None:
        """Count a request; without a status it was given up before it was answered."""
        self._requests.labels(method, route, status or "none").inc()
        if code is not None:
            self._refusals.labels(code).inc()

    def render(self, gauges: Mapping[str, float]) -> bytes:
        """The text format, with `gauges` as they are now."""
        for name, value in gauges.items():
            self._gauges[name].set(value)
        return generate_latest(self.registry)
