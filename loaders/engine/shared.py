"""Shared elements: checkpoint tensors that vLLM loads into one place, of which the last one loaded stays.

So it is with the input scales of gate and up, and with the shapes beside packed weights.
A checkpoint holds the same in each; an update has to leave it so.
"""

from collections import defaultdict
from collections.abc import Mapping

import torch

from loaders.engine.layout import Layout
from loaders.engine.provenance import Region
from schemas.problems import Code, ProblemError

Place = tuple[str, int]
"""Parameter, and position in it."""


class SharedWrites:
    """What a transaction writes through each tensor that shares elements with others, O(shared)."""

    def __init__(
        self, regions: Mapping[str, tuple[Region, ...]], shared: Mapping[str, frozenset[str]]
    ) -> None:
        self._regions = regions
        self._shared = shared
        self._written: dict[str, dict[Place, int]] = defaultdict(dict)

    def note(self, region: Region, where: torch.Tensor | Layout, bits: torch.Tensor) -> None:
        """Bits [n] for positions [n] of the region's parameter; later ones replace earlier ones."""
        if region.tensor not in self._shared:
            return
        positions = where.positions() if isinstance(where, Layout) else where
        places = ((region.parameter, position) for position in positions.tolist())
        self._written[region.tensor].update(zip(places, bits.reshape(-1).tolist(), strict=True))

    def require_equal(self) -> None:
        """Raises `tied_tensor` if a tensor is written, and one that shares elements with it not alike."""
        for tensor, written in self._written.items():
            for other in sorted(self._shared[tensor]):
                theirs = self._written.get(other, {})
                if any(theirs.get(place) != written[place] for place in self._common(written, other)):
                    raise ProblemError(
                        Code.TIED_TENSOR,
                        f"{tensor} and {other} are loaded into the same elements: send the same for each",
                    )

    def _common(self, written: dict[Place, int], other: str) -> list[Place]:
        """Those of the places that the other tensor is loaded into too."""
        found = []
        for region in self._regions[other]:
            places = [place for place in written if place[0] == region.parameter]
            positions = torch.tensor([position for _, position in places], dtype=torch.int64)
            selected, _ = region.map.inverse().map(positions)
            found += [places[index] for index in selected.tolist()]
        return found
