"""Builds safetensors bodies, right and wrong, byte by byte and without the safetensors library."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from loaders.header import HeaderLimits, parse_header
from loaders.staged import StagedFile

Tensor = tuple[str, tuple[int, ...], bytes]
"""Dtype tag, shape, data."""


def raw(header: bytes | str, data: bytes = b"") -> bytes:
    """A body with that header text, whatever it says."""
    text = header.encode() if isinstance(header, str) else header
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    """One header entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def entries(header: Mapping[str, Any], data: bytes = b"") -> bytes:
    """A body with a header given as a mapping."""
    return raw(json.dumps(header), data)


def body(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any] | None = None) -> bytes:
    """A right body: tensors one after the other."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, (dtype, shape, values) in tensors.items():
        header[name] = entry(dtype, list(shape), [len(data), len(data) + len(values)])
        data += values
    return entries(header, data)


def bf16(*values: float, shape: tuple[int, ...] | None = None) -> Tensor:
    """A BF16 tensor, 1-D unless a shape is given."""
    words = (np.array(values, "<f4").view("<u4") >> 16).astype("<u2")
    return "BF16", shape or (len(values),), words.tobytes()


def f32(*values: float, shape: tuple[int, ...] | None = None) -> Tensor:
    """An F32 tensor, 1-D unless a shape is given."""
    return "F32", (len(values),) if shape is None else shape, np.array(values, "<f4").tobytes()


def i32(*values: int) -> Tensor:
    """A list of I32 indices."""
    return "I32", (len(values),), np.array(values, "<i4").tobytes()


def i64(*values: int) -> Tensor:
    """A list of I64 indices."""
    return "I64", (len(values),), np.array(values, "<i8").tobytes()


def staged(folder: Path, content: bytes) -> StagedFile:
    """A file with that content, as `receive_body` would leave it."""
    path = folder / f"{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
    path.write_bytes(content)
    return StagedFile(path, len(content), "0" * 64, parse_header(content, HeaderLimits()))
