"""A reference for MXFP4 experts in plain torch, with a layout of its own, behind vLLM's own loaders.

vLLM's CPU build has no MXFP4 kernel. Parameters, their loaders and the method's place
are vLLM's; what happens to them after loading meets every kind of trouble: rows are
permuted and padded, registered parameters give way to attributes of the same name that
are not registered or have no loader, one weight is kept in an object as something else.
"""

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEMethodBase
from vllm.model_executor.layers.quantization import mxfp4

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the eight codes without a sign (OCP Microscaling Formats 1.0, E2M1)."""
BLOCK, PADDING = 32, 8
ALPHA, LIMIT = 1.702, 7.0
"""Of gpt-oss's gated activation."""


def dequantised(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Weights [..., n] of packed codes [..., n / 2], the lower half first, and exponents [..., n / 32]."""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)])
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    factors = torch.exp2(scales.float() - 127).repeat_interleave(BLOCK, -1)
    return table[codes.long()] * factors


class Kernel:
    """Holds the down projection as the kernel wants it, where no parameter shows it."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


class ReferenceMxfp4(mxfp4.GptOssMxfp4MoEMethod):
    """gpt-oss's MXFP4 experts on any device."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        self.weight_dtype = "gpt_oss_mxfp4"
        self.mxfp4_backend = mxfp4.Mxfp4MoeBackend.NONE
        self.moe_kernel = None

    @property
    def is_monolithic(self) -> bool:
        return False

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size_per_partition: int, *_, **__):  # type: ignore[no-untyped-def]
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        return None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        rows = layer.w13_weight.shape[1]
        order = torch.cat([torch.arange(0, rows, 2), torch.arange(1, rows, 2)])
        packed = nn.functional.pad(layer.w13_weight.data[:, order], (0, PADDING))
        scales = layer.w13_weight_scale.data[:, order].transpose(1, 2).contiguous()
        kernel = Kernel(dequantised(layer.w2_weight.data, layer.w2_weight_scale.data).to(torch.bfloat16))
        bias = layer.w13_bias.data[:, order]
        for name in ("w13_weight", "w13_weight_scale", "w13_bias", "w2_weight", "w2_weight_scale"):
            delattr(layer, name)
        layer.w13_weight, layer.w13_scale_of_columns, layer.kernel = packed, scales, kernel
        layer.w13_bias = nn.Parameter(bias, requires_grad=False)

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):  # type: ignore[no-untyped-def]
        out = torch.zeros_like(x)
        for expert in range(layer.w13_weight.shape[0]):
            number = expert if layer.expert_map is None else int((layer.expert_map == expert).nonzero()[0, 0])
            token, slot = (topk_ids == number).nonzero(as_tuple=True)
            if token.numel() == 0:
                continue
            scales = layer.w13_scale_of_columns[expert].t()
            weight = dequantised(layer.w13_weight[expert, :, :-PADDING], scales).to(x.dtype)
            gate, up = (x[token] @ weight.t() + layer.w13_bias[expert]).chunk(2, -1)
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
            inner = (up + 1) * gate * torch.sigmoid(gate * ALPHA)
            down = inner @ layer.kernel.weight[expert].t() + layer.w2_bias[expert]
            out.index_add_(0, token, down * topk_weights[token, slot, None].to(x.dtype))
        return out


def install() -> None:
    """Have vLLM use it for gpt-oss's MXFP4 checkpoints, in this process."""
    mxfp4.GptOssMxfp4Config._make_moe_method = lambda _, moe: ReferenceMxfp4(moe)
