"""Shapes that mean the same elements in the same order, as senders of packed weights write them."""

from math import prod

from schemas.dtypes import Dtype

BLOCK_BYTES = 16
"""Of an MXFP4 block, 32 codes of 4 bits: a dimension of its own in checkpoints, not in vLLM's stream."""


def same_elements(sent: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a tensor of shape `sent` can be taken for one of shape `wanted`.

    Trailing dimensions of size 1 do not count, so a single element may come as [] or [1, 1].
    """
    return _without_ones(sent) == _without_ones(wanted)


def flat_blocks(sent: tuple[int, ...], wanted: tuple[int, ...], dtype: Dtype) -> bool:
    """Whether `sent` is the shape of blocks `wanted` as vLLM streams them: `[…, rows, 16 · n]`.

    Of an expert they are `[rows, n, 16]` bytes, of all experts `[experts, rows, n, 16]`.
    """
    blocks = dtype is Dtype.U8 and len(wanted) > 2 and wanted[-1] == BLOCK_BYTES
    return blocks and same_elements(sent, (*wanted[:-2], prod(wanted[-2:])))


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
