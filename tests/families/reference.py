"""Plain torch in the place of operations that vLLM's CPU build declares and does not have."""

from pathlib import Path

import torch


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
    """Put them, and the reference kernels, in the place of vLLM's, in this process."""
    from vllm import _custom_ops  # imports take seconds, and tests that only name the plugin need none

    from tests.families import reference_experts, reference_mxfp4

    _custom_ops.scaled_fp8_quant = scaled_fp8_quant
    reference_mxfp4.install()
    reference_experts.install()


def as_plugin(folder: Path) -> str:
    """Make `folder` a distribution whose plugin vLLM finds on this path, in every process it starts."""
    described = folder / "graft_reference-0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: graft-reference\nVersion: 0\n")
    (described / "entry_points.txt").write_text(f"[vllm.general_plugins]\nreference = {__name__}:install\n")
    return str(folder)
