"""Shapes of packed weights: what means the same elements is taken, everything else is not."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaders.shapes import same_elements

SHAPES = st.lists(st.integers(1, 20), max_size=4).map(tuple)


@pytest.mark.parametrize(
    ("sent", "wanted", "same"),
    [
        ((), (1,), True),
        ((1, 1), (), True),
        ((4, 3, 1), (4, 3), True),
        ((4, 3), (4, 3, 1, 1), True),
        ((8, 32), (8, 2, 16), True),
        ((2, 8, 32), (2, 8, 2, 16), True),
        ((8, 2, 16), (8, 32), False),
        ((8, 2, 8), (8, 16), False),
        ((16, 16), (256,), False),
        ((3, 4), (4, 3), False),
        ((1, 4), (4,), False),
        ((), (2,), False),
    ],
)
def test_s1_scalars_trailing_ones_and_flat_blocks(
    sent: tuple[int, ...], wanted: tuple[int, ...], same: bool
) -> None:
    """As vLLM's streaming takes them: single elements, trailing ones, blocks without their dimension."""
    assert same_elements(sent, wanted) is same


@given(sent=SHAPES, wanted=SHAPES)
def test_only_shapes_of_one_size_are_the_same(sent: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """No element is dropped or made up; a shape is always its own."""
    assert same_elements(wanted, wanted)
    assert not same_elements(sent, wanted) or prod(sent) == prod(wanted)
