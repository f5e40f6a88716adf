"""Which version last wrote to each expert."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from loaders.catalogue import Catalogue
from loaders.names import canonical, parse_expert
from schemas.bridge import StagedUpload, TensorWrite
from schemas.status import ExpertMap, LayerExperts
from schemas.versions import VersionKind

Cell = tuple[str, int, int | None]
"""Group of names, layer, expert; none: all experts of the layer."""


@dataclass(frozen=True)
class Marks:
    """Cells and the version that last wrote to each; all others are as of `floor`, if that is known."""

    cells: Mapping[Cell, int]
    floor: int | None


_Row = tuple[str, int]
"""Group of names, layer."""


@dataclass(frozen=True)
class _Step:
    """What one version wrote over the one `before`; none: over nothing that matters to it.

    Every version has one for ever, so cells are bits: the lowest for all experts of a row, then one for each.
    """

    rows: Mapping[_Row, int]
    before: int | None
    floor: int | None


class Touched:
    """What every version has written, and what that comes to at one of them.

    A commit over the version that was last asked for costs what it has touched; another
    version, as after a rollback, costs one walk over the history that leads to it.
    """

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._at: int | None = None
        self._cells: dict[Cell, int] = {}
        self._floor: int | None = None

    def add(
        self, version: int, kind: VersionKind, before: int | None, uploads: Iterable[StagedUpload]
    ) -> None:
        """A version with weights of its own; `before` is the one that it was built on, or its first twin."""
        if kind is VersionKind.COMMIT:
            step = _Step(_packed(_cells(uploads)), before, None)
        else:
            # The base and a reload are everything; of what was adopted nobody knows.
            step = _Step({}, None, None if kind is VersionKind.ADOPTED else version)
        self._steps[version] = step
        if step.before is not None and step.before == self._at:
            self._cells |= dict.fromkeys(_unpacked(step.rows), version)
            self._at = version

    def at(self, version: int) -> Marks:
        """The state of `version`, until the next one is added or asked for."""
        if version != self._at:
            self._walk(version)
        return Marks(self._cells, self._floor)

    def _walk(self, version: int) -> None:
        self._at, self._cells = version, {}
        step = self._steps[version]
        while True:
            for cell in _unpacked(step.rows):
                self._cells.setdefault(cell, version)
            if step.before is None:
                self._floor = step.floor
                return
            version, step = step.before, self._steps[step.before]


def expert_map(version: int, marks: Marks, catalogue: Catalogue) -> ExpertMap:
    """The marks of every expert that the model has."""
    return ExpertMap(
        version=version,
        layers=tuple(_layer(layer, marks, catalogue) for layer in catalogue.expert_layers),
    )


def _layer(layer: int, marks: Marks, catalogue: Catalogue) -> LayerExperts:
    group = catalogue.expert_group(layer)
    whole = _latest(marks.floor, marks.cells.get((group, layer, None)))
    found = (marks.cells.get((group, layer, expert)) for expert in range(catalogue.info.experts))
    return LayerExperts(layer=layer, versions=tuple(_latest(whole, one) for one in found))


def _latest(one: int | None, other: int | None) -> int | None:
    """Versions only grow along a history, so the higher one came last."""
    return max((n for n in (one, other) if n is not None), default=None)


def _packed(cells: Iterable[Cell]) -> dict[_Row, int]:
    rows: dict[_Row, int] = {}
    for group, layer, expert in cells:
        bit = 0 if expert is None else expert + 1
        rows[group, layer] = rows.get((group, layer), 0) | 1 << bit
    return rows


def _unpacked(rows: Mapping[_Row, int]) -> Iterator[Cell]:
    for (group, layer), bits in rows.items():
        while bits:
            bit = (bits & -bits).bit_length() - 1
            bits ^= 1 << bit
            yield group, layer, bit - 1 if bit else None


def _cells(uploads: Iterable[StagedUpload]) -> Iterator[Cell]:
    for upload in uploads:
        for write in upload.writes:
            yield from _cells_of(write)


def _cells_of(write: TensorWrite) -> Iterator[Cell]:
    parts = parse_expert(canonical(write.tensor))
    if parts is None:
        return
    if write.experts is not None:
        yield from ((parts.group, parts.layer, expert) for expert in write.experts)
    else:
        yield parts.group, parts.layer, parts.expert if write.expert is None else write.expert
