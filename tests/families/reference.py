"""Plain torch in the place of operations that vLLM's CPU build declares and does not have."""

import torch
from vllm import _custom_ops

from tests.families import reference_mxfp4


def scaled_fp8_quant(
    values: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: torch.Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [rows, columns] as float8_e4m3fn and the scales to multiply them with: one, or one a row."""
    limit = float(torch.finfo(torch.float8_e4m3fn).max)
    wide = values.float()
    if scale is None:
        largest = wide.abs().amax(-1, keepdim=True) if use_per_token_if_dynamic else wide.abs().max().view(1)
        scale = (largest / limit).clamp(min=1e-12)
    return (wide / scale).clamp(-limit, limit).to(torch.float8_e4m3fn), scale


def install() -> None:
    """Put them in the place of vLLM's, in this process."""
    _custom_ops.scaled_fp8_quant = scaled_fp8_quant
    reference_mxfp4.install()
