"""Layouts against brute force over real torch views."""

from math import prod

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from loaders.engine.layout import Correspondence, Layout, compose, disjoint

INDEX = torch.int64


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose elements are their own flat positions."""
    return torch.arange(prod(shape), dtype=INDEX).reshape(shape)


@st.composite
def viewed(draw: st.DrawFn, base: torch.Tensor, steps: int = 4) -> torch.Tensor:
    """A view of `base` made by slices, selects, transposes, splits and joins of dimensions."""
    view = base
    for _ in range(draw(st.integers(0, steps))):
        kind = draw(
            st.sampled_from(["narrow", "select", "transpose", "step", "split", "unsqueeze", "flatten"])
        )
        if kind == "unsqueeze":
            view = view.unsqueeze(draw(st.integers(0, view.dim())))
            continue
        if view.dim() == 0:
            continue
        dim = draw(st.integers(0, view.dim() - 1))
        extent = view.shape[dim]
        if kind == "narrow":
            start = draw(st.integers(0, extent))
            view = view.narrow(dim, start, draw(st.integers(0, extent - start)))
        elif kind == "select" and extent:
            view = view.select(dim, draw(st.integers(0, extent - 1)))
        elif kind == "transpose":
            view = view.transpose(dim, draw(st.integers(0, view.dim() - 1)))
        elif kind == "step":
            index = [slice(None)] * view.dim()
            index[dim] = slice(draw(st.integers(0, 1)), None, draw(st.integers(1, 3)))
            view = view[tuple(index)]
        elif kind == "split" and extent % 2 == 0 and extent:
            view = view.unflatten(dim, (2, extent // 2) if draw(st.booleans()) else (extent // 2, 2))
        elif kind == "flatten" and view.dim() > 1:
            try:
                view = view.view(-1)
            except RuntimeError:
                continue
    return view


shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)
small = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def correspondences(draw: st.DrawFn) -> Correspondence:
    """Two views of one size: a view of a tensor, and one of its copy with other strides."""
    source = draw(viewed(numbers(draw(shapes))))
    order = draw(st.permutations(range(source.dim())))
    room = torch.empty([source.shape[d] + draw(st.integers(0, 2)) for d in order], dtype=INDEX)
    inverse = sorted(range(source.dim()), key=lambda d: order[d])
    target = room.permute(inverse)
    for dim, extent in enumerate(source.shape):
        target = target.narrow(dim, draw(st.integers(0, target.shape[dim] - extent)), extent)
    return Correspondence(Layout.of(source), Layout.of(target))


def pairs(map_: Correspondence) -> dict[int, int]:
    """The correspondence as a dictionary, by brute force."""
    return dict(zip(map_.src.positions().tolist(), map_.dst.positions().tolist(), strict=True))


@given(st.data(), shapes)
def test_positions_of_any_view(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """A view's layout gives the positions that torch itself reads, its extent and its count."""
    base = numbers(shape)
    view = data.draw(viewed(base))
    layout = Layout.of(view)
    assert torch.equal(layout.positions(), view.reshape(-1))
    assert torch.equal(layout.view(base.reshape(-1)), view)
    assert layout.numel == view.numel()
    assert layout.end == (int(view.max()) + 1 if view.numel() else layout.offset)
    if view.numel():
        assert layout.is_contiguous == view.is_contiguous()


@given(shapes, st.integers(0, 5))
def test_contiguous_is_what_torch_makes(shape: tuple[int, ...], offset: int) -> None:
    """`contiguous` has torch's strides for new tensors, scalars included."""
    assert Layout.contiguous(shape, offset) == Layout(offset, shape, torch.empty(shape).stride())


def test_view_of_a_slice_starts_where_the_slice_starts() -> None:
    """The flat tensor itself may start inside of a storage."""
    flat = torch.arange(10)[4:]
    assert Layout(1, (2,), (2,)).view(flat).tolist() == [5, 7]


def test_sizes_must_agree() -> None:
    """A correspondence of two sizes is refused."""
    with pytest.raises(ValueError, match="sizes differ"):
        Correspondence(Layout.contiguous((2, 3)), Layout.contiguous((3, 2)))


@given(correspondences(), st.data())
def test_map_against_brute_force(map_: Correspondence, data: st.DataObject) -> None:
    """Every position is mapped as the pairs say, or left out when it is in no pair."""
    expected = pairs(map_)
    asked = data.draw(st.lists(st.integers(0, map_.src.end + 4), max_size=30))
    selected, mapped = map_.map(torch.tensor(asked, dtype=INDEX))
    assert selected.tolist() == [i for i, position in enumerate(asked) if position in expected]
    assert mapped.tolist() == [expected[position] for position in asked if position in expected]


@given(correspondences())
def test_simplified_and_inverse_keep_the_pairs(map_: Correspondence) -> None:
    """Fewer dimensions or exchanged sides, but the same pairs; unit dimensions are gone."""
    assert pairs(map_.simplified()) == pairs(map_)
    assert 1 not in map_.simplified().src.size
    assert pairs(map_.inverse()) == {there: here for here, there in pairs(map_).items()}


@given(correspondences(), st.integers(0, 40), st.integers(1, 40))
def test_within_against_brute_force(map_: Correspondence, begin: int, length: int) -> None:
    """The part in a slice has exactly the pairs of the slice, or says that it is no layout."""
    wanted = {here: there for here, there in pairs(map_).items() if begin <= here < begin + length}
    try:
        part = map_.within(begin, length)
    except ValueError:
        # Only a cut through several rows is refused: then there are elements on both sides.
        assert wanted and len(wanted) < len(pairs(map_))
        return
    assert (pairs(part) if part is not None else {}) == wanted


@given(st.data(), st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple))
def test_a_slice_of_the_first_dimension_is_always_a_layout(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    """Whatever box a rank takes from a stacked tensor, one expert's part of it is found, even if
    other dimensions are as long as the number of experts."""
    base = numbers(shape)
    for dim, extent in enumerate(shape):
        start = data.draw(st.integers(0, extent - 1))
        base = base.narrow(dim, start, data.draw(st.integers(1, extent - start)))
    order = data.draw(st.permutations(range(len(shape))))
    source = base.permute(order)
    map_ = Correspondence(Layout.of(source), Layout.contiguous(tuple(source.shape)))
    length = prod(shape[1:])
    found = 0
    for expert in range(shape[0]):
        part = map_.within(expert * length, length)
        inside = {h: t for h, t in pairs(map_).items() if h // length == expert}
        assert (pairs(part) if part is not None else {}) == inside
        found += len(inside)
    assert found == source.numel()


def test_within_a_row_that_spans_several_slices() -> None:
    """Slices in the middle of a long row are not lost."""
    map_ = Correspondence(Layout(0, (2, 6), (8, 1)), Layout.contiguous((2, 6)))
    part = map_.within(4, 4)
    assert part is not None and pairs(part) == {4: 4, 5: 5}


def test_positions_beyond_32_bits() -> None:
    """Positions near and past 2**31 and huge strides are mapped exactly."""
    side = 2**20
    map_ = Correspondence(Layout(2**31 - 1, (4, 3), (side * side, 1)), Layout(5, (4, 3), (3, 1)))
    asked = torch.tensor([2**31 - 2, 2**31 - 1, 2**31 + 1, 2**31 + 2, 2**31 - 1 + 3 * side * side])
    selected, mapped = map_.map(asked)
    assert selected.tolist() == [1, 2, 4]
    assert mapped.tolist() == [5, 7, 14]


def test_map_of_nothing() -> None:
    """Zero-size layouts contain no position; scalars contain one."""
    empty = Correspondence(Layout.contiguous((3, 0)), Layout.contiguous((3, 0)))
    assert empty.map(torch.tensor([0, 1]))[0].numel() == 0
    scalar = Correspondence(Layout(3, (), ()), Layout(7, (), ()))
    selected, mapped = scalar.map(torch.tensor([2, 3, 4]))
    assert (selected.tolist(), mapped.tolist()) == ([1], [7])


@pytest.mark.parametrize("layout", [Layout(0, (3,), (0,)), Layout(0, (3, 3), (2, 1))])
def test_map_refuses_what_has_no_inverse(layout: Layout) -> None:
    """Layouts that hold a position twice are refused instead of mapped to one of its places."""
    with pytest.raises(ValueError, match="digits"):
        Correspondence(layout, Layout.contiguous(layout.size)).map(torch.tensor([0]))


@given(st.data(), small)
def test_compose_against_brute_force(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """A view of a copy lies in the original where the copied elements came from, or is refused."""
    original = data.draw(viewed(numbers(shape)))
    assume(original.numel())
    copy = original.clone(
        memory_format=data.draw(st.sampled_from([torch.contiguous_format, torch.preserve_format]))
    )
    view = data.draw(viewed(copy))
    copied = Correspondence(Layout.of(original), Layout.of(copy))
    try:
        found = compose(Layout.of(view), copied)
    except ValueError:
        return
    assert torch.equal(found.positions(), view.reshape(-1))


@given(st.data(), small)
def test_compose_follows_every_slice_of_a_transposed_copy(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    """What vLLM's loaders do — permute, make contiguous, slice — is never refused."""
    permuted = numbers(shape).permute(data.draw(st.permutations(range(len(shape)))))
    copy = view = permuted.contiguous()
    for dim in range(view.dim()):
        start = data.draw(st.integers(0, view.shape[dim] - 1))
        view = view.narrow(dim, start, data.draw(st.integers(1, view.shape[dim] - start)))
    found = compose(Layout.of(view), Correspondence(Layout.of(permuted), Layout.of(copy)))
    assert torch.equal(found.positions(), view.reshape(-1))


def test_compose_refuses_what_is_not_one_region() -> None:
    """A flat view across the rows of a transposed copy is no strided region of the original."""
    original = numbers((3, 4)).t()
    copy = original.contiguous()
    copied = Correspondence(Layout.of(original), Layout.of(copy))
    with pytest.raises(ValueError, match="not expressible"):
        compose(Layout.of(copy.view(-1)), copied)
    with pytest.raises(ValueError, match="outside"):
        compose(Layout(1, (12,), (1,)), Correspondence(Layout.contiguous((12,)), Layout.contiguous((12,))))


@given(st.data(), shapes)
def test_disjoint_never_errs(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Views said to be disjoint share no position."""
    base = numbers(shape)
    a, b = Layout.of(data.draw(viewed(base))), Layout.of(data.draw(viewed(base)))
    shared = set(a.positions().tolist()) & set(b.positions().tolist())
    assert not (disjoint(a, b) and shared)
    assert disjoint(a, b) == disjoint(b, a)


@given(st.data(), st.lists(st.integers(2, 6), min_size=1, max_size=4).map(tuple))
def test_disjoint_sees_split_dimensions(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Two parts of one dimension, beside each other or interleaved, are seen to be disjoint."""
    base = numbers(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(1, shape[dim] - 1))
    left, right = base.split([cut, shape[dim] - cut], dim)
    assert disjoint(Layout.of(left), Layout.of(right))
    shape = (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :])
    gates, ups = (numbers(shape).movedim(dim, -1)[..., parity::2] for parity in (0, 1))
    assert disjoint(Layout.of(gates), Layout.of(ups))
    assert not disjoint(Layout.of(base), Layout.of(left))
