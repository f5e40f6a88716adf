"""Safetensors bodies as a trainer would make them."""

import json
from dataclasses import dataclass

import torch
from safetensors.torch import save

DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class Sparse:
    """New values at flat positions of one tensor."""

    name: str
    shape: tuple[int, ...]
    indices: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Dense:
    """All values of one tensor."""

    name: str
    values: torch.Tensor


def plain(tensors: dict[str, torch.Tensor]) -> bytes:
    """A plain safetensors file."""
    return save({name: tensor.contiguous().clone() for name, tensor in tensors.items()})


def batch(*patches: Sparse | Dense) -> bytes:
    """A patch batch, in order."""
    listed, tensors = [], {}
    for number, patch in enumerate(patches):
        values = patch.values.contiguous().clone()
        tensors[f"p{number}.values"] = values
        entry = {
            "name": patch.name,
            "shape": list(patch.shape if isinstance(patch, Sparse) else values.shape),
            "dtype": DTYPES[values.dtype],
            "values": f"p{number}.values",
        }
        if isinstance(patch, Sparse):
            tensors[f"p{number}.indices"] = patch.indices.contiguous().clone()
            entry["indices"] = f"p{number}.indices"
        listed.append(entry)
    return save(tensors, {"patches": json.dumps(listed)})
