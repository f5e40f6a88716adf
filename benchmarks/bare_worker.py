"""What a commit is compared with, run where a commit runs: one copy of the bytes in a worker, by one RPC."""

import time

import torch

from loaders.engine.worker import GraftWorker


class BareWorker(GraftWorker):
    """Graft's worker extension, and beside it what takes no transaction."""

    bare_source: torch.Tensor | None = None
    bare_target: torch.Tensor | None = None

    def bare_nothing(self) -> str:
        """The RPC alone."""
        return ""

    def bare_copy(self, nbytes: str) -> str:
        """Copy so many bytes once, from memory to memory; how many seconds that took."""
        source, target = self.bare_source, self.bare_target
        if source is None or target is None or source.numel() != int(nbytes):
            source = torch.ones(int(nbytes), dtype=torch.uint8)
            target = torch.zeros_like(source)
            self.bare_source, self.bare_target = source, target
        begun = time.perf_counter()
        target.copy_(source)
        return str(time.perf_counter() - begun)
