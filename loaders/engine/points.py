"""Points: single elements with their new bits, collected in pieces and handed out in the order of memory.

Kernels' memory is read and written several times faster in order, and nobody waits while it
is put in order. Position and bits of a point share one word, so sorting moves both and
needs no memory beside them.
"""

import numpy as np
import torch
from numpy.typing import NDArray

_INT32_LIMIT = 2**31
_WIDEST = 4
"""Bytes of the largest bits that fit beside a position of 32."""


class Points:
    """At most `capacity` points at positions below `reach`, as integers of `dtype`; none is added twice."""

    def __init__(self, capacity: int, reach: int, dtype: torch.dtype) -> None:
        self._count = 0
        self._store: _Packed | _Apart
        if reach <= _INT32_LIMIT and dtype.itemsize <= _WIDEST:
            self._store = _Packed(capacity, dtype)
        else:
            self._store = _Apart(capacity, dtype)

    def __len__(self) -> int:
        return self._count

    def add(self, positions: torch.Tensor, bits: torch.Tensor) -> None:
        """Points at `positions`, int32 or int64 [n], with `bits` [n]."""
        end = self._count + positions.numel()
        self._store.put(slice(self._count, end), positions, bits)
        self._count = end

    def sorted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions, rising, in 32 bits where all fit, and their bits; the points are used up."""
        count, self._count = self._count, 0
        return self._store.sorted(count)


class _Packed:
    """A word of 64 bits each: the position above the bits."""

    def __init__(self, capacity: int, dtype: torch.dtype) -> None:
        self._words = np.zeros(max(capacity, 1), np.int64)
        self._dtype = dtype

    def _halves(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and bits of the first `count` words, as views."""
        words = torch.from_numpy(self._words)
        positions, bits = words.view(torch.int32)[1::2], words.view(self._dtype)[:: 8 // self._dtype.itemsize]
        return positions[:count], bits[:count]

    def put(self, where: slice, positions: torch.Tensor, bits: torch.Tensor) -> None:
        ours, own = self._halves(where.stop)
        ours[where].copy_(positions)
        own[where].copy_(bits)

    def sorted(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        _sort(self._words[:count])
        positions, bits = self._halves(count)
        apart = torch.contiguous_format  # of one element too, which `contiguous` would leave with its stride
        return positions.clone(memory_format=apart), bits.clone(memory_format=apart)


class _Apart:
    """Positions beyond 32 bits, or bits that leave no room for one."""

    def __init__(self, capacity: int, dtype: torch.dtype) -> None:
        self._positions = torch.empty(capacity, dtype=torch.int64)
        self._bits = torch.empty(capacity, dtype=dtype)

    def put(self, where: slice, positions: torch.Tensor, bits: torch.Tensor) -> None:
        self._positions[where].copy_(positions)
        self._bits[where].copy_(bits)

    def sorted(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        order = self._positions[:count].argsort()
        positions = self._positions[order]
        fit = count == 0 or int(positions[-1]) < _INT32_LIMIT
        return positions.to(torch.int32) if fit else positions, self._bits[order]


def _sort(words: NDArray[np.int64]) -> None:
    """In place; numpy's is several times faster than torch's. What is in order already is left alone."""
    if not is_rising(words):
        words.sort()


def is_rising(numbers: NDArray[np.signedinteger], piece: int = 1 << 20) -> bool:
    """Whether no number is lower than the one before, looked at in pieces up to the first that is."""
    spans = (numbers[at : at + piece + 1] for at in range(0, len(numbers), piece))
    return all(bool((span[1:] >= span[:-1]).all()) for span in spans)
