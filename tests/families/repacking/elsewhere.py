"""Functions of vLLM that rearrange weights and do not run here, with what they want; and other ones."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Elsewhere:
    """`needs` stands in the function's source: a library, an operation, or another function of this list."""

    name: str
    rearranges: str
    needs: str


_FP8_DEEP = "deepgemm_post_process_weight_scale_block"

GPU = (
    *(
        Elsewhere(f"custom_ops.{name}", what, name.replace("_moe", ""))
        for name, what in {
            "gptq_marlin_repack": "GPTQ and fp8 weights into Marlin's tiles",
            "gptq_marlin_moe_repack": "the same, of experts",
            "awq_marlin_repack": "AWQ weights into Marlin's tiles",
            "awq_marlin_moe_repack": "the same, of experts",
            "marlin_int4_fp8_preprocess": "int4 weights for fp8 activations",
            "machete_prepack_B": "weights for Machete",
            "gptq_shuffle": "GPTQ weights for ExLlama",
            "cutlass_pack_scale_fp8": "fp8 scales for CUTLASS W4A8",
            "cutlass_encode_and_reorder_int4b": "int4 weights for CUTLASS W4A8",
            "cutlass_encode_and_reorder_int4b_grouped": "the same, of experts",
        }.items()
    ),
    *(
        Elsewhere(name, what, "flashinfer")
        for name, what in {
            "flashinfer_fp4_moe.nvfp4_swizzled_scale_to_cutedsl_mma_view": "NVFP4 scales",
            "flashinfer_fp4_moe.prepare_static_weights_for_trtllm_fp4_moe": "NVFP4 experts for TRT-LLM",
            "flashinfer_mxint4_moe.prepare_static_weights_for_trtllm_mxint4_moe": "MXINT4 experts",
            "flashinfer_utils.rotate_weights_for_fi_trtllm_fp8_per_tensor_moe": "fp8 experts for TRT-LLM",
            "flashinfer_utils.convert_moe_weights_to_flashinfer_trtllm_block_layout": "experts for TRT-LLM",
            "flashinfer_utils._shuffle_deepseek_fp8_moe_weights": "fp8 experts with scales of blocks",
            "flashinfer_utils._shuffle_mxfp8_moe_weights": "MXFP8 experts",
        }.items()
    ),
    Elsewhere(
        "oracle.int_wna16._process_weights_flashinfer",
        "MXINT4 experts",
        "prepare_static_weights_for_trtllm_mxint4_moe",
    ),
    *(
        Elsewhere(f"deep_gemm.{name}", "fp8 scales for DeepGEMM", "_missing")
        for name in (
            "get_col_major_tma_aligned_tensor",
            "get_mn_major_tma_aligned_packed_ue8m0_tensor",
            "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
            "pack_ue8m0_to_int",
            "transform_sf_into_required_layout",
        )
    ),
    Elsewhere(f"fp8_utils.{_FP8_DEEP}", "fp8 scales for DeepGEMM", "transform_sf_into_required_layout"),
    Elsewhere("fp8_utils.deepgemm_post_process_fp8_weight_block", "an fp8 linear for DeepGEMM", _FP8_DEEP),
    Elsewhere(
        "fp8_utils.prepare_fp8_moe_layer_for_deepgemm",
        "fp8 experts for DeepGEMM",
        "deepgemm_post_process_fp8_weight_block",
    ),
    Elsewhere("oracle.mxfp4._pack_deepgemm_mxfp4_scales", "MXFP4 scales for DeepGEMM", _FP8_DEEP),
    Elsewhere("mxfp4_utils._swizzle_mxfp4", "MXFP4 experts for Triton", "triton_kernels"),
    Elsewhere("qutlass_utils.triton_scale_swizzle", "MXFP4 scales", "tl."),
    Elsewhere(
        "oracle.w4a8.convert_to_w4a8_moe_kernel_format",
        "W4A8 experts",
        "cutlass_encode_and_reorder_int4b_grouped",
    ),
    Elsewhere("oracle.int_wna16._process_weights_rdna3", "WNA16 experts for RDNA3", "gptq_shuffle"),
    *(
        Elsewhere(f"humming.{name}", "weights for Humming", "humming")
        for name in (
            "linear.convert_linear_layer_to_humming_standard",
            "linear.prepare_humming_linear_layer_config",
            "moe._convert_sublayer_to_humming",
            "moe._prepare_and_transform_sublayer",
            "moe._process_single_sublayer",
            "moe.convert_to_humming_moe_kernel_format",
        )
    ),
)
"""Proved when an engine starts on a GPU, and not here."""

OTHER_CPUS = (
    Elsewhere("experts.cpu_moe.prepare_fp8_moe_layer_for_cpu", "fp8 experts", "convert_weight_packed"),
    Elsewhere("experts.cpu_moe.prepare_fp8_w8a8_moe_layer_for_cpu", "fp8 experts", "convert_weight_packed"),
    Elsewhere("experts.cpu_moe.prepare_mxfp4_moe_layer_for_cpu", "MXFP4 experts", "convert_weight_packed"),
    Elsewhere(
        "experts.cpu_moe.prepare_int4_moe_layer_for_cpu", "int4 experts", "convert_weight_packed_scale_zp"
    ),
    Elsewhere("oracle.int_wna16._process_weights_cpu", "int4 experts", "prepare_int4_moe_layer_for_cpu"),
    Elsewhere("custom_ops.convert_weight_packed_scale_zp", "int4 weights", "convert_weight_packed_scale_zp"),
    Elsewhere("custom_ops.cpu_prepack_moe_weight_int8", "int8 experts", "prepack_moe_weight_int8"),
    Elsewhere("custom_ops.causal_conv1d_weight_pack", "convolutions", "causal_conv1d_weight_pack"),
    Elsewhere("oracle.int_wna16._zen_repack_s4", "int4 experts for ZenDNN", "zentorch"),
    Elsewhere("oracle.int_wna16._process_weights_zen_cpu", "int4 experts for ZenDNN", "_zen_repack_s4"),
)
"""Proved when an engine starts on a CPU that has them: with AMX, or AMD's with zentorch."""

NOT_WEIGHTS = frozenset(
    [
        "marlin_utils.marlin_padded_nk",
        "marlin_utils.marlin_repacked_nk",
        "marlin_utils.marlin_unpad_output",
        "marlin_utils.marlin_moe_padded_intermediate",
        "flashinfer_utils.trtllm_nvfp4_hidden_alignment",
        "fp8_utils._silu_mul_quant_fp8_packed_kernel",
        "fp8_utils.silu_mul_quant_fp8_packed_triton",
        "fp8_utils.per_token_group_quant_fp8_packed_for_deepgemm",
        "mxfp4_utils.should_use_cdna4_mx_scale_swizzle",
        "mxfp4_utils.permute_shape",
        "nvfp4_utils.nvfp4_weight_padding_bytes",
        "nvfp4_utils.pad_nvfp4_activation_for_cutlass",
        "quant_utils._normalize_quant_group_shape",
        "quant_utils.get_pack_factor",
        "oracle.fp8.pad_tp_shard_to_weight_blocks",
        "oracle.int_wna16._synthesize_rdna3_qzeros",
        "oracle.unquantized.aiter_moe_intermediate_alignment",
        "b12x._normalize_topk_ids",
        "b12x._normalize_topk_weights",
        "experts.cpu_moe.swigluoai_w13_interleave_perm",
        "experts.cutlass_moe._prepare_topk_ids_for_cutlass_fp4_moe",
        "rdna_hybrid_w4a16._weight_pad_bytes",
        "rdna_hybrid_w4a16._act_pad_bytes",
        "rdna_hybrid_w4a16._pad_activation_rows",
        "deep_gemm.get_mk_alignment_for_contiguous_layout",
        "deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout",
        "deep_gemm.set_mk_alignment_for_contiguous_layout",
        "deep_gemm.mk_alignment_scope",
        "deep_gemm._align",
        "deep_gemm.get_tma_aligned_size",
        "custom_ops.shuffle_rows",
        "custom_ops.moe_align_block_size",
        "custom_ops.batched_moe_align_block_size",
        "custom_ops.moe_lora_align_block_size",
        "custom_ops.swap_blocks",
        "custom_ops.swap_blocks_batch",
        "custom_ops.convert_fp8",
        "custom_ops.cp_gather_and_upconvert_fp8_kv_cache",
        "custom_ops.cp_gather_and_upconvert_nvfp4_kv_cache",
        "custom_ops.weight_packed_linear_cpu",
        "custom_ops.topk_transform_512_cpu",
        "custom_ops.hadacore_transform",
    ]
)
"""Sizes, indices, activations, caches: nothing that was loaded is rearranged."""

BY_BACKEND = frozenset(
    [
        "oracle.fp8.convert_to_fp8_moe_kernel_format",
        "oracle.int8.convert_to_int8_moe_kernel_format",
        "oracle.int_wna16.convert_to_wna16_moe_kernel_format",
        "oracle.mxfp4.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format",
        "oracle.mxfp4.convert_weight_to_mxfp4_moe_kernel_format",
        "oracle.nvfp4.convert_to_nvfp4_moe_kernel_format",
    ]
)
"""Hand their arguments to the others, by backend."""

BY_ENGINE = frozenset({"custom_ops.cpu_prepack_moe_weight"})
"""Run by vLLM's CPU engine, and tried in `tests/families/rows.py`."""
