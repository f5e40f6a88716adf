"""Safetensors bodies for tests, written by hand so that they can also be wrong."""

import json
from collections.abc import Mapping
from pathlib import Path

from schemas.dtypes import Dtype

Part = tuple[Dtype, tuple[int, ...], bytes]


def body(parts: Mapping[str, Part], metadata: Mapping[str, str] | None = None) -> bytes:
    """A file of `parts`, in their order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    offset = 0
    for name, (dtype, shape, data) in parts.items():
        end = offset + len(data)
        header[name] = {"dtype": str(dtype), "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in parts.values())


def parse(content: bytes) -> dict[str, Part]:
    """The parts of a well-formed file."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    data = content[8 + size :]
    return {
        name: (Dtype(e["dtype"]), tuple(e["shape"]), data[e["data_offsets"][0] : e["data_offsets"][1]])
        for name, e in header.items()
    }


def write_file(path: Path, parts: Mapping[str, Part], metadata: Mapping[str, str] | None = None) -> int:
    """Write a file; its size in bytes."""
    return path.write_bytes(body(parts, metadata or None))
