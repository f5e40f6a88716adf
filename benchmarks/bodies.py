"""Bodies: safetensors files as clients send them, staged and checked as the admin does it."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from loaders.header import HeaderLimits, parse_header
from loaders.patch_list import METADATA_KEY
from loaders.staged import StagedFile, file_digest
from schemas.dtypes import Dtype

_HEAD = 64 << 20
"""Longer than any header here."""
NAMES = {torch.bfloat16: Dtype.BF16, torch.float32: Dtype.F32}


def patch_entry(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, values: str, indices: str | None = None
) -> dict[str, object]:
    """One member of a batch's list of patches; `values` and `indices` are tensors of the file."""
    entry: dict[str, object] = {"name": name, "shape": shape, "dtype": NAMES[dtype], "values": values}
    return entry if indices is None else entry | {"indices": indices}


def write_batch(
    path: Path, tensors: Mapping[str, torch.Tensor], patches: list[dict[str, object]]
) -> StagedFile:
    """A patch batch on disk."""
    save_file(dict(tensors), path, metadata={METADATA_KEY: json.dumps(patches)})
    return staged(path)


def staged(path: Path) -> StagedFile:
    """A file as it is once it was received."""
    with path.open("rb") as file:
        header = parse_header(file.read(_HEAD), HeaderLimits())
    return StagedFile(path, path.stat().st_size, file_digest(path), header)
