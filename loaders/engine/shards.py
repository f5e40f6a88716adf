"""Checkpoint-format shards: this rank's part of parameters that vLLM gave up after packing them.

A shard lies in an unlinked file mapped into memory, so that it costs page cache and
not the memory that serves, and is gone when the worker is. It is built from the base
checkpoint on first need and changed by the same moves as runtime tensors, so it is
always at the version that the worker is at.
"""

import os
import tempfile
from pathlib import Path

import torch

from loaders.engine.atlas import Atlas, Site


class Shards:
    """The shards of one rank; `folder` is where their files are made."""

    def __init__(self, atlas: Atlas, folder: Path) -> None:
        self._atlas = atlas
        self._folder = folder
        self._made: set[str] = set()

    def has(self, site: Site) -> bool:
        """Whether the shard of the site is there."""
        return site.shard in self._made

    def add(self, site: Site, flat: torch.Tensor) -> None:
        """Keep a shard that was made and found to be what the engine runs."""
        self._atlas.targets[site.shard] = flat
        self._made.add(site.shard)

    def build(self, site: Site) -> torch.Tensor:
        """Make the shard of a site from the base checkpoint, flat; padding is zero.

        Raises OSError if there is no room for the file.
        """
        numel = int(torch.Size(site.shape).numel())
        flat = _mapped(self._folder, numel, site.dtype)
        for region in self._atlas.into.get(site.name, ()):
            source = self._atlas.checkpoint.read(region.tensor)
            region.map.dst.view(flat).copy_(region.map.src.view(region.into(source)))
        return flat


def _mapped(folder: Path, numel: int, dtype: torch.dtype) -> torch.Tensor:
    nbytes = max(1, numel * dtype.itemsize)
    handle, path = tempfile.mkstemp(prefix="shard-", dir=folder)
    try:
        os.posix_fallocate(handle, 0, nbytes)
        return torch.from_file(path, shared=True, size=numel, dtype=dtype)
    finally:
        os.close(handle)
        Path(path).unlink()
