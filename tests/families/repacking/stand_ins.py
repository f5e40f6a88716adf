"""Plain torch in the place of what functions that rearrange weights want of a GPU.

vLLM's tests compare its repacking operations with functions of its own in plain torch;
those stand in for them. Their results are those of the operations, so they have the
same treatment; that they have is proved when an engine starts on a GPU.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


@contextmanager
def standing_in(names: Iterable[str]) -> Iterator[None]:
    """What is named is there for a while."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            _INSTALL[name](patch)
        yield


def _cuda(patch: pytest.MonkeyPatch) -> None:
    """Tensors say that they are on a GPU, and moving one there is nothing."""
    patch.setattr(torch.Tensor, "is_cuda", True)
    patch.setattr(torch.Tensor, "cuda", lambda self: self)


def _scaled_fp8_quant(patch: pytest.MonkeyPatch) -> None:
    from vllm import _custom_ops

    from tests.families.reference import scaled_fp8_quant

    patch.setattr(_custom_ops, "scaled_fp8_quant", scaled_fp8_quant)


def _repack(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.ops._C, "gptq_marlin_repack", gptq_marlin_repack, raising=False)
    patch.setattr(torch.ops._C, "awq_marlin_repack", awq_marlin_repack, raising=False)


def _one_rank(patch: pytest.MonkeyPatch) -> None:
    """Parameters are made outside of an engine, which would have told them their rank."""
    from vllm.model_executor import parameter

    patch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    patch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)


_INSTALL = {
    "cuda": _cuda,
    "scaled_fp8_quant": _scaled_fp8_quant,
    "marlin_repack": _repack,
    "one_rank": _one_rank,
}


def gptq_marlin_repack(
    packed: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool
) -> torch.Tensor:
    """Weights [k / per word, n], packed along k, in Marlin's tiles."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32

    weights = unpack_quantized_values_into_int32(packed, _type(num_bits), 0)
    return _tiled(weights, size_k, size_n, num_bits, is_a_8bit)


def awq_marlin_repack(
    packed: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool
) -> torch.Tensor:
    """Weights [k, n / per word], packed along n in AWQ's order, in Marlin's tiles."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_cols

    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7] if num_bits == 4 else [0, 2, 1, 3])
    weights = unpack_cols(packed, num_bits, size_k, size_n).view(-1, len(order))
    return _tiled(weights[:, order.argsort()].reshape(size_k, size_n), size_k, size_n, num_bits, is_a_8bit)


def _tiled(weights: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool) -> torch.Tensor:
    from vllm.model_executor.layers.quantization.utils import marlin_utils_test

    order = marlin_utils_test.get_weight_perm(num_bits, is_a_8bit)
    return marlin_utils_test.marlin_weights(weights, size_k, size_n, num_bits, order, is_a_8bit)


def _type(num_bits: int) -> Any:
    from vllm.scalar_type import scalar_types

    return {4: scalar_types.uint4b8, 8: scalar_types.uint8b128}[num_bits]
