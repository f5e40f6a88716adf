"""An MXFP4 gpt-oss and the ways to name and shape what is sent to it."""

import os
from pathlib import Path

import torch

from tests.families.models import make_family, quantise_mxfp4
from tests.families.reference import as_plugin

STREAMING = {
    "gate_up_proj_blocks": "w13_weight",
    "gate_up_proj_scales": "w13_weight_scale",
    "gate_up_proj_bias": "w13_bias",
    "down_proj_blocks": "w2_weight",
    "down_proj_scales": "w2_weight_scale",
    "down_proj_bias": "w2_bias",
}
"""What vLLM's loader calls an expert's tensors when they are streamed to it."""
PACKED = STREAMING | {"gate_up_proj_blocks": "w13_weight_packed", "down_proj_blocks": "w2_weight_packed"}


def make_model(folder: Path) -> Path:
    """Write the checkpoint: 64 wide, experts of 128, so that two ranks have two blocks of 32 each."""
    return quantise_mxfp4(make_family("gpt-oss", folder.with_name(f"{folder.name}-plain")), folder)


def reference(folder: Path) -> dict[str, str]:
    """Variables by which every vLLM process uses the reference kernel: the CPU build has none."""
    path = (as_plugin(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
    return {"VLLM_PLUGINS": "reference", "PYTHONPATH": os.pathsep.join(filter(None, path))}


def streamed(tensors: dict[str, torch.Tensor], names: dict[str, str]) -> dict[str, torch.Tensor]:
    """An expert's tensors under vLLM's names, blocks as rows of bytes, as it streams them."""
    return {
        names[name]: tensor.flatten(1) if name.endswith("_blocks") else tensor
        for name, tensor in tensors.items()
    }
