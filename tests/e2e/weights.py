"""The weights that a test thinks the engine has: a checkpoint in memory, changed as the engine is."""

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.e2e.bodies import Dense, Sparse

EXPERT = re.compile(r"^model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(?:(\d+)\.)?(.+)$")


class Weights:
    """All checkpoint tensors of a model by name."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.tensors: dict[str, torch.Tensor] = {}
        for path in sorted(model.glob("*.safetensors")):
            self.tensors |= load_file(path)
        config = json.loads((model / "config.json").read_text())
        self.layers: int = config["num_hidden_layers"]
        self.experts: int = config.get("num_local_experts") or config["num_experts"]

    def expert(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        """One expert's tensors under the names of an upload; views of the whole."""
        found = {}
        for name, tensor in self.tensors.items():
            match = EXPERT.match(name)
            if match and int(match[1]) == layer and match[2] in (None, str(expert)):
                found[match[3]] = tensor[expert] if match[2] is None else tensor
        return found

    def apply(self, patches: Iterable[Sparse | Dense]) -> None:
        """Change the weights as a batch should."""
        for patch in patches:
            tensor = self.tensors[patch.name]
            if isinstance(patch, Dense):
                tensor.copy_(patch.values.view(tensor.shape))
            else:
                tensor.view(-1)[patch.indices.long()] = patch.values

    def save(self, folder: Path) -> Path:
        """A checkpoint folder with these weights and everything else of the model's."""
        shutil.copytree(self.model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(
            {name: tensor.contiguous() for name, tensor in self.tensors.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        return folder

    def sparse_like(self, name: str, density: float, seed: int, index: torch.dtype) -> Sparse:
        """A sparse patch that visibly changes a share of a tensor, indices as they come."""
        generator = torch.Generator().manual_seed(seed)
        tensor = self.tensors[name]
        count = max(1, int(tensor.numel() * density))
        indices = torch.randperm(tensor.numel(), generator=generator)[:count]
        values = altered(tensor.view(-1)[indices], generator, float(tensor.float().std()))
        return Sparse(name, tuple(tensor.shape), indices.to(index), values)


def altered(values: torch.Tensor, generator: torch.Generator, spread: float = 0.3) -> torch.Tensor:
    """Other values, off by about a third of `spread`; bytes have one or both of their lowest bits changed."""
    if values.dtype is torch.uint8:
        return values ^ torch.randint(1, 4, values.shape, generator=generator, dtype=torch.uint8)
    noise = torch.randn(values.shape, generator=generator) * (spread + 1e-3)
    return (values.float() * 0.9 + 0.3 * noise).to(values.dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality, so that -0 differs from 0."""
    return a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
