"""Reference experts in plain torch for quantised formats, behind vLLM's own methods, loaders and processing.

vLLM's CPU build has no kernel for these on a machine without AMX. Its layer classes make
the parameters, load them and process them for one of its backends; only the last step,
the product, is done here, from the layout that this backend, or the experts class
itself, makes after loading.
"""

from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import nn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts import int4_emulation_moe
from vllm.model_executor.layers.fused_moe.oracle import int_wna16
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.int8 import Int8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, fp8, modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4,
    compressed_tensors_moe_w8a8_fp8,
    compressed_tensors_moe_w8a8_int8,
    compressed_tensors_moe_wna16,
)
from vllm.model_executor.layers.quantization.quark import quark_moe
from vllm.model_executor.layers.quantization.utils.flashinfer_utils import swap_w13_to_w31
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant_dequant

from tests.families.reference_mxfp4 import ALPHA, LIMIT, VALUES
from tests.families.reference_mxfp4 import dequantised as dequantised_mxfp4

ROWS, COLUMNS = 128, 4
"""Tile in which block scales lie for NVFP4 products (layout of cuBLAS's 1D block scaling)."""
VNNI = 4
"""Bytes of one row that lie together in int8 tiles."""


def codes_of(packed: torch.Tensor) -> torch.Tensor:
    """Four-bit codes [..., 2n] of bytes [..., n], the lower half first."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """Scales [experts, rows, blocks], padded, as tiles of 128 × 4 whose rows lie 32 apart."""
    experts, rows, blocks = scales.shape
    padded = scales.new_zeros(experts, -(-rows // ROWS) * ROWS, -(-blocks // COLUMNS) * COLUMNS)
    padded.view(torch.uint8)[:, :rows, :blocks] = scales.view(torch.uint8)
    tiles = padded.view(experts, padded.shape[1] // ROWS, 4, 32, padded.shape[2] // COLUMNS, COLUMNS)
    return tiles.permute(0, 1, 4, 3, 2, 5).contiguous().view(padded.shape)


def untiled(tiles: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """The scales [rows, blocks] of one expert out of its tiles."""
    high, wide = tiles.shape
    view = tiles.view(high // ROWS, wide // COLUMNS, 32, 4, COLUMNS).permute(0, 3, 2, 1, 4)
    return view.reshape(high, wide)[:rows, :blocks]


class ReferenceExperts(mk.FusedMoEExpertsModular):
    """Experts of any format: a subclass gives one expert's two weights in float32.

    Biases and gpt-oss's activation come with the layer.
    """

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in (MoEActivation.SILU, MoEActivation.SWIGLUOAI)

    @staticmethod
    def _supports_parallel_config(*_: Any) -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(*_: Any) -> bool:
        return True

    def moe_problem_size(self, a1, w1, w2, topk_ids):  # type: ignore[no-untyped-def]
        wide = self.moe_config.intermediate_size_per_partition * self.moe_config.w13_num_shards
        return w1.shape[0], a1.shape[0], wide, a1.shape[-1], topk_ids.shape[1]

    def workspace_shapes(self, M, N, K, *_):  # type: ignore[no-untyped-def]
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def weights(self, w1: torch.Tensor, w2: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both weights of an expert, [2 × inner, hidden] (gate first) and [hidden, inner], in float32."""
        raise NotImplementedError

    def rounded(self, values: torch.Tensor, part: int) -> torch.Tensor:
        """Activations [tokens, n] before the first product, or the second, as the format has them."""
        return values

    def apply(  # type: ignore[no-untyped-def]
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts,
        expert_map, **_,
    ) -> None:  # fmt: skip
        output.zero_()
        for expert in range(w1.shape[0]):
            number = expert if expert_map is None else int((expert_map == expert).nonzero()[0, 0])
            token, slot = (topk_ids == number).nonzero(as_tuple=True)
            if token.numel() == 0:
                continue
            up, down = self.weights(w1, w2, expert)
            inner = self.rounded(hidden_states[token].float(), 0) @ up.t()
            if self.w1_bias is not None:
                inner = inner + self.w1_bias[expert].float()
            out = self.rounded(activated(inner, activation), 1) @ down.t()
            if self.w2_bias is not None:
                out = out + self.w2_bias[expert].float()
            output.index_add_(0, token, (out * topk_weights[token, slot, None]).to(output.dtype))


def activated(inner: torch.Tensor, activation: MoEActivation) -> torch.Tensor:
    """The gated product of [tokens, 2 × inner]: halves, or for gpt-oss every second."""
    if activation is MoEActivation.SWIGLUOAI:
        gate, up = inner[:, ::2].clamp(max=LIMIT), inner[:, 1::2].clamp(-LIMIT, LIMIT)
        return (up + 1) * gate * torch.sigmoid(gate * ALPHA)
    gate, up = inner.chunk(2, -1)
    return nn.functional.silu(gate) * up


class ReferenceNvfp4(ReferenceExperts):
    """Codes with a float8 scale for 16 and one for each expert: halves swapped, scales in tiles."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.w13_weight = nn.Parameter(swap_w13_to_w31(layer.w13_weight.data), requires_grad=False)
        for name in ("w13_weight_scale", "w2_weight_scale"):
            scales = getattr(layer, name).data
            scales = swap_w13_to_w31(scales) if "13" in name else scales
            setattr(layer, name, nn.Parameter(tiled(scales), requires_grad=False))
        self.scales = layer.w13_weight_scale, layer.w2_weight_scale
        # As the kernels of FlashInfer want it: one factor for the product of both global scales.
        self.factors = self.g1_alphas * layer.w13_input_scale, self.g2_alphas * layer.w2_input_scale
        self.inputs = layer.w13_input_scale, layer.w2_input_scale

    def weights(self, w1: torch.Tensor, w2: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (self._weight(w[expert], part, expert) for part, w in enumerate((w1, w2)))
        return first.view(2, -1, first.shape[1]).flip(0).reshape(first.shape), second

    def rounded(self, values: torch.Tensor, part: int) -> torch.Tensor:
        return ref_nvfp4_quant_dequant(values, (self.a1_gscale, self.a2_gscale)[part], 16)

    def _weight(self, packed: torch.Tensor, part: int, expert: int) -> torch.Tensor:
        codes = codes_of(packed)
        scales = untiled(self.scales[part][expert], codes.shape[0], codes.shape[1] // 16).float()
        table = torch.tensor([*VALUES, *(-value for value in VALUES)])
        factor = self.factors[part][expert] / self.inputs[part]
        return table[codes.long()] * scales.repeat_interleave(16, -1) * factor


class ReferenceInt4(ReferenceExperts):
    """Four-bit integers as bytes, scales of groups, and zero points if the checkpoint has them."""

    def weights(self, w1: torch.Tensor, w2: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            self._weight(
                w1[expert], self.w1_scale[expert], None if self.w1_zp is None else self.w1_zp[expert]
            ),
            self._weight(
                w2[expert], self.w2_scale[expert], None if self.w2_zp is None else self.w2_zp[expert]
            ),
        )

    @staticmethod
    def _weight(packed: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        codes = codes_of(packed).float()
        group = codes.shape[1] // scale.shape[1]
        zero = codes_of(zeros.t()).t().float().repeat_interleave(group, 1) if zeros is not None else 8.0
        return (codes - zero) * scale.float().repeat_interleave(group, 1)


class ReferencePlain(ReferenceExperts):
    """Weights that processing has made floats of."""

    def weights(self, w1: torch.Tensor, w2: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return w1[expert].float(), w2[expert].float()


class WithFloat8Inputs(ReferenceExperts):
    """Activations rounded by one scale, if the checkpoint has it."""

    def rounded(self, values: torch.Tensor, part: int) -> torch.Tensor:
        scale = (self.a1_scale, self.a2_scale)[part]
        if scale is None:
            return values
        return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


class ReferenceFp8(WithFloat8Inputs):
    """Float8 with one scale, a scale for each row, or for each block."""

    def weights(self, w1: torch.Tensor, w2: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (
            self._weight(w1[expert], self.w1_scale[expert]),
            self._weight(w2[expert], self.w2_scale[expert]),
        )
        return first, second

    @staticmethod
    def _weight(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for dim in range(scale.ndim if scale.numel() > 1 else 0):
            size = -(-weight.shape[dim] // scale.shape[dim])
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
        return weight.float() * scale


class ReferenceInt8(ReferenceExperts):
    """Int8 with a scale for each row, four bytes of 16 rows together, as VNNI tiles lie."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        for name in ("w13_weight", "w2_weight"):
            weight = getattr(layer, name).data
            tiles = weight.view(weight.shape[0], -1, 16, weight.shape[2] // VNNI, VNNI).transpose(2, 3)
            setattr(layer, name, nn.Parameter(tiles.contiguous().view(weight.shape), requires_grad=False))

    def weights(self, w1: torch.Tensor, w2: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._weight(w1[expert], self.w1_scale[expert]), self._weight(
            w2[expert], self.w2_scale[expert]
        )

    @staticmethod
    def _weight(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        tiles = weight.view(-1, weight.shape[1] // VNNI, 16, VNNI).transpose(1, 2)
        return tiles.reshape(weight.shape).float() * scale


class ReferenceOcpMxfp4(WithFloat8Inputs):
    """MXFP4 as the checkpoint has it, as vLLM's emulation takes it."""

    def weights(self, w1: torch.Tensor, w2: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            dequantised_mxfp4(w1[expert], self.w1_scale[expert]),
            dequantised_mxfp4(w2[expert], self.w2_scale[expert]),
        )


def choose(backend: object, experts: type[ReferenceExperts]) -> Callable[..., tuple[object, type]]:
    """In the place of vLLM's choice of a backend."""
    return lambda *_, **__: (backend, experts)


def _choose_wna16(*_: Any, may_have_zp: bool = False, **__: Any) -> tuple[WNA16MoEBackend, type]:
    """Without zero points bytes that are used as they are, with them what vLLM dequantises while loading."""
    if may_have_zp:
        return WNA16MoEBackend.EMULATION, ReferencePlain
    return WNA16MoEBackend.TRITON, ReferenceInt4


def install() -> None:
    """Have vLLM's methods choose these, in this process."""
    nvfp4 = choose(NvFp4MoeBackend.EMULATION, ReferenceNvfp4)
    compressed_tensors_moe_w4a4_nvfp4.select_nvfp4_moe_backend = nvfp4
    modelopt.select_nvfp4_moe_backend = nvfp4
    for module in (fp8, compressed_tensors_moe_w8a8_fp8, quark_moe, modelopt):
        module.select_fp8_moe_backend = choose(Fp8MoeBackend.TRITON, ReferenceFp8)
    compressed_tensors_moe_w8a8_int8.select_int8_moe_backend = choose(Int8MoeBackend.TRITON, ReferenceInt8)
    int_wna16.TritonWNA16Experts = ReferenceInt4  # which classes may be chosen is a fixed list
    int4_emulation_moe.Int4EmulationTritonExperts = ReferencePlain
    compressed_tensors_moe_wna16.select_wna16_moe_backend = _choose_wna16
    for module in (auto_gptq, auto_awq):
        module.select_wna16_moe_backend = choose(WNA16MoEBackend.EMULATION, ReferencePlain)
        module.check_moe_marlin_supports_layer = lambda *_, **__: (
            True
        )  # else another format's method is taken
    quark_moe.select_mxfp4_moe_backend = choose(Mxfp4MoeBackend.EMULATION, ReferenceOcpMxfp4)
    quark_moe.backend_to_kernel_cls = lambda _: [ReferenceOcpMxfp4]
