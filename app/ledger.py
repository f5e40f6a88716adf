"""Versions, what can be rolled back to, and baselines. Kept in memory."""

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime

from schemas.problems import Code, ProblemError
from schemas.transactions import Receipt
from schemas.versions import VersionKind


@dataclass(frozen=True)
class VersionRecord:
    """One entry of the history."""

    version: int
    kind: VersionKind
    created_at: datetime
    base_version: int | None = None
    restores: int | None = None
    transaction: str | None = None
    label: str | None = None
    receipt: Receipt | None = None


@dataclass(frozen=True)
class BaselineRecord:
    """A name for a version."""

    name: str
    version: int
    created_at: datetime


class Ledger:
    """The history of the weights, and the undo that the engine holds to walk it back.

    A rollback makes a new version with the weights of an old one, so several versions
    can have the same weights; going back to one of them goes to the nearest.
    """

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.undo: dict[int, int] = {}
        """Version → bytes per rank to step back from it to the one before."""
        self._records: dict[int, VersionRecord] = {}
        self._baselines: dict[str, BaselineRecord] = {}
        self._root: dict[int, int] = {}
        self._nearest: dict[int, int] = {}
        self._current = 0
        self.append(VersionRecord(0, VersionKind.BASE, datetime.now(UTC)))

    @property
    def current(self) -> VersionRecord:
        """What the engine should be running."""
        return self._records[self._current]

    @property
    def next(self) -> int:
        """The number that the next change takes if it succeeds."""
        return self._current + 1

    def records(self) -> tuple[VersionRecord, ...]:
        """All versions, oldest first."""
        return tuple(self._records.values())

    def get(self, version: int) -> VersionRecord:
        """One version; raises unknown_version."""
        if version not in self._records:
            raise ProblemError(Code.UNKNOWN_VERSION, f"There is no version {version}.")
        return self._records[version]

    def append(self, record: VersionRecord) -> None:
        """Make `record` the current version."""
        self._records[record.version] = record
        root = record.version if record.restores is None else self._root[record.restores]
        self._root[record.version] = root
        self._nearest[root] = record.version
        self._current = record.version

    def adopt(self, version: int) -> None:
        """Take over an engine that already runs `version` and holds `undo`.

        Raises ValueError if this ledger has a history that the engine does not share.
        """
        if version != self._current and self._current != 0:
            raise ValueError(f"The engine runs version {version}, but {self._current} is the current one.")
        lowest = version
        while lowest in self.undo:
            lowest -= 1
        for held in range(max(lowest, self._current + 1), version + 1):
            self.append(VersionRecord(held, VersionKind.ADOPTED, datetime.now(UTC)))

    def nearest(self, version: int) -> int:
        """The latest version with the same weights as `version`."""
        return self._nearest[self._root[self.get(version).version]]

    def lowest_reachable(self) -> int:
        """Every version whose nearest twin is at or above this one can be gone back to."""
        lowest = self._current
        while lowest in self.undo:
            lowest -= 1
        return lowest

    def held(self, version: int) -> bool:
        """Whether the engine holds what rolling back to `version` needs."""
        return self.nearest(version) >= self.lowest_reachable()

    def require_held(self, version: int) -> None:
        """Refuse a version that can't be rolled back to, known or not: version_not_held."""
        if version not in self._records:
            raise ProblemError(Code.VERSION_NOT_HELD, f"There has been no version {version}.")
        if not self.held(version):
            detail = f"The undo down to version {version} is no longer held; GET /v1/versions says what is."
            raise ProblemError(Code.VERSION_NOT_HELD, detail)

    def forgettable(self, restoring: int | None = None) -> int:
        """The undo of versions up to this one is needed by no baseline.

        With `restoring`: once that version has been rolled back to, when baselines on
        the same weights need no undo any more.
        """
        root = None if restoring is None else self._root[restoring]
        needed = [self.nearest(b.version) for b in self._baselines.values() if self._root[b.version] != root]
        return min(needed, default=self._current)

    def baselines(self) -> tuple[BaselineRecord, ...]:
        """All baselines by name."""
        return tuple(self._baselines[name] for name in sorted(self._baselines))

    def baseline(self, name: str) -> BaselineRecord:
        """One baseline; raises unknown_baseline."""
        if name not in self._baselines:
            raise ProblemError(Code.UNKNOWN_BASELINE, "There is no baseline of this name.")
        return self._baselines[name]

    def set_baseline(self, name: str, version: int, undo_budget: int) -> BaselineRecord:
        """Keep `version` within reach. Raises version_not_held, undo_budget."""
        self.require_held(version)
        nearest = self.nearest(version)
        if sum(n for v, n in self.undo.items() if v > nearest) > undo_budget:
            raise ProblemError(Code.UNDO_BUDGET, "The undo that this baseline needs is over the budget.")
        record = BaselineRecord(name, version, datetime.now(UTC))
        self._baselines[name] = record
        return record

    def delete_baseline(self, name: str) -> None:
        """Forget the name; raises unknown_baseline."""
        self.baseline(name)
        del self._baselines[name]
