"""Changes of a whole checkpoint, as the bodies that clients send."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from benchmarks.bodies import patch_entry
from loaders.patch_list import METADATA_KEY

Tensors = Mapping[str, torch.Tensor]


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def drawn(tensors: Tensors, share: float, seed: int = 3) -> dict[str, torch.Tensor]:
    """Positions of that share of every tensor, int32, unsorted, each about equally likely."""
    generator = torch.Generator().manual_seed(seed)
    picked = {}
    for name, tensor in tensors.items():
        count = max(1, int(share * tensor.numel()))
        width = tensor.numel() / count
        jitter = torch.rand(count, generator=generator, dtype=torch.float64)
        spread = ((torch.arange(count) + jitter) * width).long().clamp_(max=tensor.numel() - 1)
        indices = torch.unique_consecutive(spread)
        picked[name] = indices[torch.randperm(indices.numel(), generator=generator)].to(torch.int32)
    return picked


def differing(old: Tensors, new: Tensors) -> dict[str, torch.Tensor]:
    """Positions of all elements whose bits are not the same, int32, of the tensors that have some."""
    found = {}
    for name, tensor in new.items():
        changed = (tensor.view(torch.int16) != old[name].view(torch.int16)).view(-1).nonzero().squeeze(1)
        if changed.numel():
            found[name] = changed.to(torch.int32)
    return found


def sparse_body(tensors: Tensors, positions: Tensors) -> bytes:
    """A batch with the elements of `tensors` at these positions."""
    entries, parts = [], {}
    for number, (name, indices) in enumerate(positions.items()):
        tensor = tensors[name]
        parts[f"v{number}"] = tensor.reshape(-1)[indices.long()]
        parts[f"i{number}"] = indices
        entries.append(patch_entry(name, tuple(tensor.shape), tensor.dtype, f"v{number}", f"i{number}"))
    return save(parts, {METADATA_KEY: json.dumps(entries)})


def dense_body(tensors: Tensors) -> bytes:
    """A plain file of whole tensors, as a shard of a checkpoint is."""
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt"})


def shaken(tensors: Tensors, factor: float = 1.02) -> dict[str, torch.Tensor]:
    """All tensors with other values near the old ones."""
    return {name: (tensor.float() * factor).to(tensor.dtype) for name, tensor in tensors.items()}
