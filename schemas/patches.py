"""The patch list that a batch carries in its safetensors metadata under `patches`."""

from typing import Annotated

from pydantic import Field, TypeAdapter

from schemas.base import Input
from schemas.dtypes import Dtype

Name = Annotated[str, Field(min_length=1, max_length=1024)]


class Patch(Input):
    """New values for one checkpoint tensor.

    `values` and `indices` name tensors in the same body. Indices are flat row-major
    positions in the full checkpoint tensor of `shape`; without them `values` holds
    every element. Values are absolute, in the checkpoint tensor's dtype.

    Where the checkpoint stacks experts, a name such as `….experts.3.w13_weight` is one
    expert's slice: shape and positions are then the slice's.
    """

    name: Name
    shape: tuple[Annotated[int, Field(strict=True, ge=0)], ...]
    dtype: Dtype
    values: Name
    indices: Name | None = None


PATCHES = TypeAdapter(list[Patch])
"""Parses the JSON text of `__metadata__["patches"]`."""
