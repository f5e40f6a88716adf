"""Handles of oneDNN: exchanged in place with what keeps them right."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def packed(weight: torch.Tensor) -> Any:
    """A handle that multiplies with `weight`, [K, N]."""
    from vllm._custom_ops import create_onednn_mm

    return create_onednn_mm(weight)


def multiplied(handle: Any) -> torch.Tensor:
    from vllm._custom_ops import onednn_mm

    return onednn_mm(handle, X, None)


def test_an_exchange_and_back() -> None:
    """After an exchange each multiplies with the other's weight, from the same 8 bytes; twice is nothing."""
    from loaders.engine.handles import keep, swap

    live, spare = packed(torch.ones(8, 4)), packed(torch.full((8, 4), 2.0))
    address, before, other = live.handler_tensor.data_ptr(), multiplied(live), multiplied(spare)
    first, second = torch.ones(1), torch.ones(2)
    keep(live, [first])
    keep(spare, [second])
    swap(live, spare)
    assert live.handler_tensor.data_ptr() == address
    assert torch.equal(multiplied(live), other) and torch.equal(multiplied(spare), before)
    assert live.graft_kept[0] is second and spare.graft_kept[0] is first
    swap(live, spare)
    assert torch.equal(multiplied(live), before) and live.graft_kept[0] is first


def test_what_was_never_kept_is_nothing() -> None:
    """vLLM's own handles keep nothing of Graft's; exchanged, the new one has it all."""
    from loaders.engine.handles import keep, swap

    live, spare = packed(torch.ones(8, 4)), packed(torch.ones(8, 4))
    scales = torch.ones(4)
    keep(spare, [scales])
    swap(live, spare)
    assert live.graft_kept == (scales,) and spare.graft_kept == ()


def test_handles_of_other_shapes_are_not_exchanged() -> None:
    """Nothing is moved, also not what is kept."""
    from loaders.engine.handles import keep, swap

    live, spare = packed(torch.ones(8, 4)), packed(torch.ones(8, 5))
    keep(spare, [torch.ones(1)])
    before = live.handler_tensor.clone()
    with pytest.raises(ValueError, match="handle shapes differ"):
        swap(live, spare)
    assert torch.equal(live.handler_tensor, before) and not hasattr(live, "graft_kept")


def test_an_int8_handle_reads_its_scales_where_they_were() -> None:
    """Why scales are kept: written over, they change the products; the weight it was made from does not."""
    from vllm._custom_ops import create_onednn_scaled_mm, onednn_scaled_int8_quant, onednn_scaled_mm

    weight = torch.randint(-9, 9, (8, 16), dtype=torch.int8).t().contiguous().t()
    scales = torch.full((16,), 0.5)
    handle = create_onednn_scaled_mm(weight, scales, torch.float32, True, False)
    ints, row_scales, _ = onednn_scaled_int8_quant(X)

    def products() -> torch.Tensor:
        return onednn_scaled_mm(handle, ints, torch.empty(3, 16), row_scales, None, None, None)

    before = products()
    assert bool((before != 0).any())
    weight.zero_()
    assert torch.equal(products(), before)
    scales.mul_(2)
    assert torch.equal(products(), before * 2)
