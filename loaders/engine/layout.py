"""Strided layouts: affine maps from a multi-index to a flat position, composed and inverted.

A layout says where the elements of a tensor view lie in its storage. Everything
that vLLM's loaders do with views (slices, transposes, stacks) is such a map, so a
region of a checkpoint tensor and its place in a parameter are two layouts of one size.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import gcd, prod

import torch


@dataclass(frozen=True, slots=True)
class Layout:
    """Position of element `i` is `offset + Σ i[k]·stride[k]`, in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> "Layout":
        """Layout of a view within its storage; works on meta tensors."""
        return Layout(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))

    @staticmethod
    def contiguous(shape: tuple[int, ...], offset: int = 0) -> "Layout":
        """Row-major layout of `shape` that starts at `offset`."""
        strides = [1]
        for extent in reversed(shape[1:]):
            strides.append(strides[-1] * extent)
        return Layout(offset, tuple(shape), tuple(reversed(strides[: len(shape)])))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.size)

    @property
    def end(self) -> int:
        """One past the highest position, for layouts with non-negative strides."""
        if self.numel == 0:
            return self.offset
        return self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True)) + 1

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        return self.stride == Layout.contiguous(self.size).stride or self._nontrivial() == _row_major(
            [n for n in self.size if n > 1]
        )

    def _nontrivial(self) -> list[tuple[int, int]]:
        return [(n, s) for n, s in zip(self.size, self.stride, strict=True) if n > 1]

    def view(self, storage: torch.Tensor) -> torch.Tensor:
        """The elements as a view of a flat tensor that spans the storage."""
        return storage.as_strided(self.size, self.stride, storage.storage_offset() + self.offset)

    def positions(self) -> torch.Tensor:
        """Flat positions of all elements in row-major order of the index, int64 [numel]."""
        out = torch.tensor([self.offset], dtype=torch.int64)
        for extent, stride in zip(self.size, self.stride, strict=True):
            out = (out[:, None] + torch.arange(extent, dtype=torch.int64) * stride).reshape(-1)
        return out


def _row_major(extents: list[int]) -> list[tuple[int, int]]:
    strides = Layout.contiguous(tuple(extents)).stride
    return list(zip(extents, strides, strict=True))


@dataclass(frozen=True, slots=True)
class Correspondence:
    """Element `i` of layout `src` corresponds to element `i` of layout `dst`."""

    src: Layout
    dst: Layout

    def __post_init__(self) -> None:
        if self.src.size != self.dst.size:
            raise ValueError(f"sizes differ: {self.src.size} and {self.dst.size}")

    def inverse(self) -> "Correspondence":
        """The same with both sides exchanged."""
        return Correspondence(self.dst, self.src)

    def simplified(self) -> "Correspondence":
        """The same map with fewer dimensions: unit ones dropped, mergeable neighbours merged."""
        dims = sorted(
            (
                (n, s, d)
                for n, s, d in zip(self.src.size, self.src.stride, self.dst.stride, strict=True)
                if n != 1
            ),
            key=lambda dim: -dim[1],
        )
        merged: list[tuple[int, int, int]] = []
        for n, s, d in dims:
            if merged and merged[-1][1] == n * s and merged[-1][2] == n * d:
                merged[-1] = (merged[-1][0] * n, s, d)
            else:
                merged.append((n, s, d))
        size = tuple(n for n, _, _ in merged)
        return Correspondence(
            Layout(self.src.offset, size, tuple(s for _, s, _ in merged)),
            Layout(self.dst.offset, size, tuple(d for _, _, d in merged)),
        )

    def map(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map flat `src` positions, int64 [n], to `dst` positions.

        Returns (selected, mapped): indices into `positions` of those that `src`
        contains, and where these are in `dst`. O(n · dimensions).

        Raises ValueError if `src` holds a position twice or its digits overlap.
        """
        if self.src.numel == 0:
            return positions.new_empty(0), positions.new_empty(0)
        flat = self.simplified()
        require_nested(flat.src)
        rest = positions - flat.src.offset
        inside = rest >= 0
        mapped = torch.full_like(rest, flat.dst.offset)
        for n, s, d in zip(flat.src.size, flat.src.stride, flat.dst.stride, strict=True):
            digit = quotients(rest, s)
            inside &= digit < n
            mapped += digit * d
            rest = rest - digit * s
        inside &= rest == 0
        if bool(inside.all()):
            return torch.arange(positions.numel()), mapped
        selected = inside.nonzero().squeeze(1)
        return selected, mapped[selected]

    def within(self, begin: int, length: int) -> "Correspondence | None":
        """The part whose `src` positions lie in [begin, begin + length); None if there is none.

        Raises ValueError if the part is not itself a layout: rows cut off at different places.
        """
        flat = self.simplified()
        src, dst = flat.src, flat.dst
        if begin <= src.offset and src.end <= begin + length:
            return flat
        if src.end <= begin or src.offset >= begin + length:
            return None
        # Strides are nested, so rows of the outermost dimension lie one after the other.
        n, s, d = src.size[0], src.stride[0], dst.stride[0]
        reach = src.end - src.offset - (n - 1) * s
        first = max(0, _ceil_div(begin - src.offset - reach + 1, s))
        last = min(n, _ceil_div(begin + length - src.offset, s))
        if first >= last:
            return None
        rows = Correspondence(
            Layout(src.offset + first * s, (last - first, *src.size[1:]), src.stride),
            Layout(dst.offset + first * d, (last - first, *src.size[1:]), dst.stride),
        )
        if last - first > 1 and not (begin <= rows.src.offset and rows.src.end <= begin + length):
            raise ValueError("a row of the region crosses the slice's edge")
        return rows.within(begin, length)


def quotients(numbers: torch.Tensor, divisor: int) -> torch.Tensor:
    """Quotients, rounded down, of int64 [n]; numpy multiplies where torch divides, several times as fast."""
    return torch.from_numpy(numbers.numpy() // divisor)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def require_nested(layout: Layout) -> None:
    """Each stride must cover all that the smaller ones reach, so that digits are unique.

    Raises ValueError if one does not, or if strides do not descend.
    """
    reach = sum((n - 1) * s for n, s in zip(layout.size, layout.stride, strict=True))
    for n, s in zip(layout.size, layout.stride, strict=True):
        reach -= (n - 1) * s
        if s <= reach or s <= 0:
            raise ValueError("layout is not invertible by digits")
    if any(a < b for a, b in pairwise(layout.stride)):
        raise ValueError("strides are not sorted")


def compose(view: Layout, copied: Correspondence) -> Layout:
    """Where a view of a copy lies in what was copied.

    `copied.dst` is the layout of the copy in its own storage, `copied.src` that of
    the original; `view` is a view of the copy's storage. Returns the layout of the
    view's elements in the original's storage.

    Raises ValueError if the result is not a single layout.
    """
    if view == copied.dst:
        return copied.src
    inverse = copied.inverse()
    corners = torch.tensor(
        [view.offset]
        + [view.offset + s for n, s in zip(view.size, view.stride, strict=True) if n > 1]
        + ([view.end - 1] if view.numel else []),
        dtype=torch.int64,
    )
    selected, mapped = inverse.map(corners)
    if selected.numel() != corners.numel():
        raise ValueError("the view reaches outside of the copy")
    origin = int(mapped[0])
    steps = iter(mapped[1:].tolist())
    stride = tuple(next(steps) - origin if n > 1 else 0 for n in view.size)
    candidate = Layout(origin, view.size, stride)
    if not _agrees(candidate, view, inverse):
        raise ValueError("a view of a copy is not expressible as one strided region")
    return candidate


def _agrees(candidate: Layout, view: Layout, inverse: Correspondence) -> bool:
    """Check the candidate along every edge of the index space; affine there is affine everywhere.

    Digits of `inverse` are nested, so a carry anywhere shows on the edge of the
    dimension that causes it, or at the far corner.
    """
    probes = [torch.zeros(1, len(view.size), dtype=torch.int64)]
    for axis, extent in enumerate(view.size):
        for base in (0, -1):
            edge = torch.zeros(extent, len(view.size), dtype=torch.int64)
            if base == -1:
                edge[:] = torch.tensor(view.size, dtype=torch.int64) - 1
            edge[:, axis] = torch.arange(extent)
            probes.append(edge)
    index = torch.cat(probes)
    strides = torch.tensor([view.stride, candidate.stride], dtype=torch.int64).reshape(2, -1)
    in_copy = view.offset + index @ strides[0]
    expected = candidate.offset + index @ strides[1]
    selected, mapped = inverse.map(in_copy)
    return selected.numel() == in_copy.numel() and bool(torch.equal(mapped, expected))


def disjoint(a: Layout, b: Layout) -> bool:
    """Whether two layouts surely share no position, such as parts of one dimension, adjacent or alternating.

    At every scale, positions modulo the larger strides fall into a window; windows that do
    not meet are enough.
    """
    if a.numel == 0 or b.numel == 0:
        return True
    ours, theirs = _by_stride(a), _by_stride(b)
    scales = sorted({0, *(s for _, s in (*ours, *theirs))}, reverse=True)
    return any(_windows_apart(a.offset, ours, b.offset, theirs, scale) for scale in scales)


def _by_stride(layout: Layout) -> list[tuple[int, int]]:
    return [(n, s) for n, s in zip(layout.size, layout.stride, strict=True) if n > 1]


def _windows_apart(
    a: int, ours: list[tuple[int, int]], b: int, theirs: list[tuple[int, int]], scale: int
) -> bool:
    """Compare windows of strides below `scale` modulo the common divisor of the others; 0 is all strides."""
    outer = [s for _, s in (*ours, *theirs) if scale and s >= scale]
    reaches = [sum((n - 1) * s for n, s in dims if not scale or s < scale) for dims in (ours, theirs)]
    if not outer:
        return a + reaches[0] < b or b + reaches[1] < a
    period = gcd(*outer)
    return (b - a) % period > reaches[0] and (a - b) % period > reaches[1]
