"""Opaque kernel handles: packed weights behind a pointer, exchanged in place.

vLLM's CPU linears may run from a oneDNN primitive that holds a packed copy of the
weight. The kernel finds it through an 8-byte tensor, so exchanging the contents of
two such tensors exchanges the weights, and doing it again brings them back. Seen
on vLLM 0.32.0; the closure that calls the kernel is not touched.

An int8 primitive reads its scales through a pointer into the tensor that it was made
with (seen too), so what a handle was made from has to live as long as the primitive.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm._custom_ops import CPUDNNLGEMMHandler


def keep(handle: CPUDNNLGEMMHandler, tensors: Sequence[torch.Tensor]) -> None:
    """Let `tensors` live as long as the primitive that `handle` points to now."""
    holder: Any = handle
    holder.graft_kept = tuple(tensors)


def swap(live: CPUDNNLGEMMHandler, spare: CPUDNNLGEMMHandler) -> None:
    """Exchange what two handles of one shape point to; each still frees what it then holds.

    Raises ValueError if the shapes differ.
    """
    require_same_shape(live, spare)
    pointer = live.handler_tensor.clone()
    live.handler_tensor.copy_(spare.handler_tensor)
    spare.handler_tensor.copy_(pointer)
    kept = _kept(live)
    keep(live, _kept(spare))
    keep(spare, kept)


def _kept(handle: CPUDNNLGEMMHandler) -> tuple[torch.Tensor, ...]:
    kept: tuple[torch.Tensor, ...] = getattr(handle, "graft_kept", ())
    return kept


def require_same_shape(live: CPUDNNLGEMMHandler, spare: CPUDNNLGEMMHandler) -> None:
    """Raises ValueError if the two handles cannot be exchanged."""
    if (live.n, live.k) != (spare.n, spare.k):
        raise ValueError(f"handle shapes differ: {(live.n, live.k)} and {(spare.n, spare.k)}")
