"""Tensors that are loaded into the same elements: a transaction has to leave them equal."""

import pytest
import torch

from loaders.engine.layout import Correspondence, Layout
from loaders.engine.provenance import Region
from loaders.engine.shared import SharedWrites
from schemas.problems import Code, ProblemError


def region(tensor: str, begin: int, count: int) -> Region:
    """All of the tensor, into elements from `begin` on of one parameter."""
    places = Layout(begin, (count,), (1,))
    return Region(tensor, "p", Correspondence(Layout.contiguous((count,)), places), torch.int8, torch.int8)


GATE, UP, OTHER = region("gate", 0, 3), region("up", 2, 2), region("other", 4, 2)
REGIONS = {r.tensor: (r,) for r in (GATE, UP, OTHER)}
SHARED = {"gate": frozenset({"up"}), "up": frozenset({"gate"})}


def writes(*noted: tuple[Region, list[int], list[int]]) -> SharedWrites:
    """Positions and values noted for each region."""
    found = SharedWrites(REGIONS, SHARED)
    for where, positions, values in noted:
        found.note(where, torch.tensor(positions), torch.tensor(values))
    return found


FINE: dict[str, tuple[tuple[Region, list[int], list[int]], ...]] = {
    "alike": ((GATE, [0, 1, 2], [5, 6, 7]), (UP, [2, 3], [7, 8])),
    "alike in the end": ((GATE, [2], [1]), (GATE, [2], [7]), (UP, [2], [7])),
    "elsewhere": ((GATE, [0, 1], [5, 6]),),
    "not shared": ((OTHER, [4, 5], [1, 2]),),
    "nothing": (),
}


@pytest.mark.parametrize("case", FINE)
def test_equal_writes_pass(case: str) -> None:
    """The same in the shared elements, or nothing in them, is no problem."""
    writes(*FINE[case]).require_equal()


UNEQUAL: dict[str, tuple[tuple[Region, list[int], list[int]], ...]] = {
    "one alone": ((GATE, [2], [7]),),
    "the other alone": ((UP, [2, 3], [7, 8]),),
    "unlike": ((GATE, [2], [7]), (UP, [2], [8])),
    "unlike in the end": ((GATE, [2], [7]), (UP, [2], [7]), (UP, [2], [8])),
}


@pytest.mark.parametrize("case", UNEQUAL)
def test_unequal_writes_are_refused(case: str) -> None:
    """What would depend on which was loaded last is refused with both names."""
    with pytest.raises(ProblemError) as refused:
        writes(*UNEQUAL[case]).require_equal()
    assert refused.value.code is Code.TIED_TENSOR
    assert "gate" in str(refused.value) and "up" in str(refused.value)


def test_a_dense_write_counts_by_its_layout() -> None:
    """A whole tensor is noted by where its elements go."""
    found = writes((UP, [2, 3], [7, 8]))
    found.note(GATE, GATE.map.dst, torch.tensor([5, 6, 7]))
    found.require_equal()
