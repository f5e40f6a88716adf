"""Shapes of packed weights: what means the same elements is taken, everything else is not."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaders.shapes import flat_blocks, same_elements
from schemas.dtypes import Dtype

SHAPES = st.lists(st.integers(1, 20), max_size=4).map(tuple)


@pytest.mark.parametrize(
    ("sent", "wanted", "same"),
    [
        ((), (1,), True),
        ((1, 1), (), True),
        ((4, 3, 1), (4, 3), True),
        ((4, 3), (4, 3, 1, 1), True),
        ((8, 32), (8, 2, 16), False),
        ((256,), (16, 16), False),
        ((16, 16), (256,), False),
        ((3, 4), (4, 3), False),
        ((1, 4), (4,), False),
        ((), (2,), False),
    ],
)
def test_s1_scalars_and_trailing_ones(sent: tuple[int, ...], wanted: tuple[int, ...], same: bool) -> None:
    """As vLLM's streaming takes them: single elements in any form, and trailing ones."""
    assert same_elements(sent, wanted) is same


@pytest.mark.parametrize(
    ("sent", "wanted", "dtype", "flat"),
    [
        ((8, 32), (8, 2, 16), Dtype.U8, True),
        ((8, 32, 1), (8, 2, 16), Dtype.U8, True),
        ((2, 8, 32), (2, 8, 2, 16), Dtype.U8, True),
        ((8, 2, 16), (8, 2, 16), Dtype.U8, False),
        ((8, 2, 16), (8, 32), Dtype.U8, False),
        ((8, 64), (8, 2, 16), Dtype.U8, False),
        ((16, 16), (8, 2, 16), Dtype.U8, False),
        ((256,), (8, 2, 16), Dtype.U8, False),
        ((32, 8), (8, 2, 16), Dtype.U8, False),
        ((256,), (16, 16), Dtype.U8, False),
        ((8, 16), (8, 2, 8), Dtype.U8, False),
        ((8, 32), (8, 2, 16), Dtype.BF16, False),
    ],
)
def test_s1_flat_blocks(sent: tuple[int, ...], wanted: tuple[int, ...], dtype: Dtype, flat: bool) -> None:
    """Rows of blocks may come as rows of bytes; no other flattening is taken, nor that of other tensors."""
    assert flat_blocks(sent, wanted, dtype) is flat


@given(sent=SHAPES, wanted=SHAPES)
def test_only_shapes_of_one_size_are_the_same(sent: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """No element is dropped or made up; a shape is always its own."""
    assert same_elements(wanted, wanted)
    assert not same_elements(sent, wanted) or prod(sent) == prod(wanted)
    assert not flat_blocks(sent, wanted, Dtype.U8) or prod(sent) == prod(wanted)
