"""Versions, what can be rolled back to, and baselines: the ledger as it is read, in memory."""

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from app.lineage import Lineage, blobs_of, compacted
from app.touched import Marks, Touched
from schemas.bridge import StagedUpload
from schemas.problems import Code, ProblemError
from schemas.transactions import Receipt
from schemas.versions import VersionEntry, VersionKind


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
    uploads: tuple[StagedUpload, ...] = ()
    """What this version writes over the one before."""


@dataclass(frozen=True)
class BaselineRecord:
    """A name for a version."""

    name: str
    version: int
    created_at: datetime


class Ledger:
    """The history of the weights, and what of it can be had again.

    A rollback makes a new version with the weights of an old one, so several versions can
    have the same weights. The first of them is their *root*; going back to one of them by
    undo goes to the nearest.
    """

    def __init__(self) -> None:
        self.tell: Callable[[VersionRecord], None] = _nobody
        """Who is told of a version once it is the current one."""
        self.begin(uuid.uuid4().hex, [VersionRecord(0, VersionKind.BASE, datetime.now(UTC))], ())

    def begin(self, id: str, records: Iterable[VersionRecord], baselines: Iterable[BaselineRecord]) -> None:
        """Hold this history and no other."""
        self.id = id
        self.undo: dict[int, int] = {}
        """Version → bytes per rank to step back from it to the one before."""
        self.base_at_hand = False
        """Whether the base checkpoint's files can be read, so that kept versions can be rebuilt in place."""
        self._records: dict[int, VersionRecord] = {}
        self._baselines = {record.name: record for record in baselines}
        self._root: dict[int, int] = {}
        self._nearest: dict[int, int] = {}
        self._lineages: dict[int, Lineage] = {}
        self._needs: dict[int, frozenset[str]] = {}
        self._touched = Touched()
        self._unrecorded: set[int] = set()
        self._current = 0
        for record in records:
            self.append(record)

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
        root = record.version if record.restores is None else self._root[record.restores]
        if root == record.version:
            self._begin_root(record)
            before = None if record.base_version is None else self._root[record.base_version]
            self._touched.add(record.version, record.kind, before, record.uploads)
        # The writes live on in the lineage, and only for as long as that is kept.
        self._records[record.version] = replace(record, uploads=())
        self._root[record.version] = root
        self._nearest[root] = record.version
        self._current = record.version
        self.tell(record)

    def _begin_root(self, record: VersionRecord) -> None:
        if record.kind is VersionKind.BASE:
            self._keep(record.version, ())
            return
        before = None if record.base_version is None else self.lineage(record.base_version)
        if record.kind is VersionKind.RELOAD:
            before = ()  # it writes everything anew, whatever was there
        if record.kind is VersionKind.ADOPTED or before is None:
            self._unrecorded.add(record.version)
        else:
            self._keep(record.version, compacted((*before, *record.uploads)))

    def _keep(self, root: int, lineage: Lineage) -> None:
        self._lineages[root], self._needs[root] = lineage, blobs_of(lineage)

    def touched(self, version: int) -> Marks:
        """Which version last wrote to each expert, as of `version`; raises unknown_version."""
        return self._touched.at(self.root(version))

    def entry(self, record: VersionRecord) -> VersionEntry:
        """A version on the wire."""
        return self.entries((record,))[0]

    def entries(self, records: Iterable[VersionRecord]) -> tuple[VersionEntry, ...]:
        """Versions on the wire; what is the same for all is looked up once."""
        lowest = self.lowest_reachable()
        names: dict[int, tuple[str, ...]] = {}
        for one in self.baselines():
            names[one.version] = (*names.get(one.version, ()), one.name)
        return tuple(self._entry(record, lowest, names.get(record.version, ())) for record in records)

    def _entry(self, record: VersionRecord, lowest: int, baselines: tuple[str, ...]) -> VersionEntry:
        receipt = record.receipt
        return VersionEntry(
            version=record.version,
            kind=record.kind,
            created_at=record.created_at,
            base_version=record.base_version,
            restores=record.restores,
            transaction=record.transaction,
            label=record.label,
            path=receipt.path if receipt else None,
            held=self._held(record.version, lowest),
            undo_nbytes=self.undo.get(record.version, 0),
            baselines=baselines,
            tensors=receipt.tensors if receipt else 0,
            experts=receipt.experts if receipt else 0,
            nbytes=receipt.nbytes if receipt else None,
            timing=receipt.timing if receipt else None,
        )

    def lineage(self, version: int) -> Lineage | None:
        """What the weights of `version` consist of; none if that was never known, or was let go."""
        return self._lineages.get(self._root[self.get(version).version])

    def needs(self) -> dict[int, frozenset[str]]:
        """Root → blobs that its lineage needs, those first whose weights were served last."""
        latest = sorted(self._needs, key=lambda root: self._nearest[root], reverse=True)
        return {root: self._needs[root] for root in latest}

    def root(self, version: int) -> int:
        """The first version with the same weights."""
        return self._root[self.get(version).version]

    def pinned(self) -> set[int]:
        """Roots that must be kept: of the current version and of the baselines."""
        return {self._root[self._current], *(self._root[b.version] for b in self._baselines.values())}

    def let_go(self, roots: Iterable[int]) -> None:
        """The uploads that these roots need are no longer kept: their versions can't be had again."""
        for root in roots:
            self._lineages.pop(root, None)
            self._needs.pop(root, None)

    def learn_undo(self, held: Mapping[int, int]) -> None:
        """What undo the engine holds, per rank."""
        self.undo = dict(held)

    def nearest(self, version: int) -> int:
        """The latest version with the same weights as `version`."""
        return self._nearest[self.root(version)]

    def lowest_reachable(self) -> int:
        """Every version whose nearest twin is at or above this one can be gone back to by undo."""
        lowest = self._current
        while lowest in self.undo:
            lowest -= 1
        return lowest

    def undoable(self, version: int) -> bool:
        """Whether the engine holds the undo down to `version`."""
        return self.nearest(version) >= self.lowest_reachable()

    def rebuildable(self, version: int) -> bool:
        """Whether `version` can be had from the base checkpoint's files and kept uploads."""
        return (
            self.base_at_hand
            and self.lineage(version) is not None
            and self._root[self._current] in self._lineages
        )

    def held(self, version: int) -> bool:
        """Whether `version` can be rolled back to, and then be had again after a crash."""
        return self._held(version, self.lowest_reachable())

    def held_count(self) -> int:
        """How many versions can be rolled back to."""
        lowest = self.lowest_reachable()
        return sum(self._held(version, lowest) for version in self._records)

    def _held(self, version: int, lowest: int) -> bool:
        root = self.root(version)
        lasting = root in self._lineages or root in self._unrecorded
        return self.rebuildable(version) or (lasting and self.nearest(version) >= lowest)

    def require_held(self, version: int) -> None:
        """Refuse a version that can't be rolled back to, known or not: version_not_held."""
        if version not in self._records:
            raise ProblemError(Code.VERSION_NOT_HELD, f"There has been no version {version}.")
        if not self.held(version):
            detail = f"What version {version} needs is no longer held; GET /v1/versions says what is."
            raise ProblemError(Code.VERSION_NOT_HELD, detail)

    def forgettable(self, restoring: int | None = None) -> int:
        """The undo of versions up to this one is needed by no baseline.

        With `restoring`: once that version has been rolled back to, when baselines on
        the same weights need no undo any more.
        """
        root = None if restoring is None else self._root[restoring]
        needed = [
            self.nearest(b.version)
            for b in self._baselines.values()
            if self._root[b.version] != root and not self.rebuildable(b.version)
        ]
        return min(needed, default=self._current)

    def baselines(self) -> tuple[BaselineRecord, ...]:
        """All baselines by name."""
        return tuple(self._baselines[name] for name in sorted(self._baselines))

    def baseline(self, name: str) -> BaselineRecord:
        """One baseline; raises unknown_baseline."""
        if name not in self._baselines:
            raise ProblemError(Code.UNKNOWN_BASELINE, "There is no baseline of this name.")
        return self._baselines[name]

    def new_baseline(self, name: str, version: int, undo_budget: int) -> BaselineRecord:
        """A name that would keep `version` within reach. Raises version_not_held, undo_budget."""
        self.require_held(version)
        if not self.rebuildable(version):
            nearest = self.nearest(version)
            if sum(n for v, n in self.undo.items() if v > nearest) > undo_budget:
                raise ProblemError(Code.UNDO_BUDGET, "The undo that this baseline needs is over the budget.")
        return BaselineRecord(name, version, datetime.now(UTC))

    def set_baseline(self, record: BaselineRecord) -> None:
        """Let a name stand for a version."""
        self._baselines[record.name] = record

    def delete_baseline(self, name: str) -> None:
        """Forget the name; raises unknown_baseline."""
        self.baseline(name)
        del self._baselines[name]


def _nobody(record: VersionRecord) -> None:
    """There is nobody to tell."""
