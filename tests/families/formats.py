"""Writes docs/formats.md: quantised format × path × where it is proved. `python -m tests.families.formats`."""

from pathlib import Path

from tests.families.rows import ROWS

DOCUMENT = Path(__file__).parents[2] / "docs" / "formats.md"
FORMATS = {
    "gpt-oss MXFP4": ("MXFP4 of gpt-oss", "`…_blocks`, `…_scales`", "permuted, padded, a copy in an object"),
    "Quark MXFP4": ("MXFP4 by Quark, fp8 inputs", "`weight`, `weight_scale`, `input_scale`", "as loaded"),
    "Quark FP8": ("FP8 by Quark", "`weight`, `weight_scale`, `input_scale`", "quantised again by one scale"),
    "NVFP4": (
        "NVFP4 (compressed-tensors)",
        "`weight_packed`, `weight_scale`, `weight_global_scale`, `input_global_scale`",
        "gate and up swapped, scales in tiles, global scales multiplied",
    ),
    "W4A16": (
        "W4A16 (compressed-tensors)",
        "`weight_packed`, `weight_scale`, `weight_shape`",
        "the same bytes under another dtype",
    ),
    "W4A16 with zero points": (
        "W4A16 with zero points",
        "as above, and `weight_zero_point`",
        "dequantised while loading",
    ),
    "AWQ": ("AWQ", "`qweight`, `qzeros`, `scales`", "dequantised while loading"),
    "GPTQ": ("GPTQ", "`qweight`, `qzeros`, `scales`, `g_idx`", "dequantised while loading"),
    "FP8 by rows": ("FP8, a scale a row", "`weight`, `weight_scale`", "as loaded"),
    "FP8 by tensors": (
        "FP8, one scale",
        "`weight`, `weight_scale`, `input_scale`",
        "quantised again by the larger scale of gate and up",
    ),
    "FP8 by blocks": ("FP8, a scale a block", "`weight`, `weight_scale_inv`", "as loaded"),
    "W8A8 experts": ("W8A8 experts", "`weight`, `weight_scale`", "in VNNI tiles"),
    "llama W8A8": ("W8A8 linears", "`weight`, `weight_scale`", "oneDNN's own, behind a handle"),
    "llama quantised online to fp8": ("fp8, quantised online", "bf16 `weight`", "quantised while loading"),
}
"""Row → the format's name, its tensors, and what becomes of them in the engine that is tried."""
HEAD = """# Quantised formats

What is sent is what the checkpoint holds: packed bytes, scales, zero points, under its own names. Every
path is tried on vLLM's own layer classes, loaders and processing, through Graft's session in the worker:

| path | proved by | shows |
|---|---|---|
| expert | `test_s1_experts_one_by_one_change_nothing` | every expert of every layer with its own weights: the same digests, tokens, log-probabilities |
| sparse | `test_s4_sparse_and_dense_changes_equal_a_fresh_engine` | one in twenty elements of every tensor: as a fresh engine on such a checkpoint |
| dense | the same | a third of the tensors, and single experts: as a fresh engine |
| reload | `test_s2_three_reloads_change_nothing`, `test_s5_again_and_again_and_back` | the whole checkpoint three times in a row |
| rollback | `test_s5_again_and_again_and_back` | after ten commits on one tensor, and to the start, bit for bit |

This CPU has kernels for none of these experts, so the last step, the product, is a reference in plain torch
(`tests/families/reference_experts.py`), from a layout of the kind that kernels want; W8A8 linears run from vLLM's own.
The bias that one rank adds for all (gpt-oss's `down_proj`) is there on rank 0 and zero elsewhere in bf16, MXFP4 and Quark's
formats alike; a fresh engine on the changed checkpoint says the same.

"""
PATHS = ("expert", "sparse", "dense", "reload", "rollback")
GPU = "at start, `make test-gpu`"


def layouts(row: str) -> list[str]:
    """Layouts in which a format is tried; where the CPU engine cannot generate, digests alone tell."""
    found = []
    for name, spec in ROWS.items():
        if name == row or (name.startswith(f"{row} ") and name.removeprefix(f"{row} ") in ("TP=2", "EP=2")):
            layout = name.removeprefix(row).strip() or "one rank"
            found.append(layout if spec.generates else f"{layout} (digests)")
    return found


def line(row: str) -> str:
    """The line of a format."""
    name, tensors, layout = FORMATS[row]
    where = "here: " + ", ".join(layouts(row))
    dense_model = row.startswith("llama")
    cells = ["no experts" if path == "expert" and dense_model else "✓" for path in PATHS]
    return f"| {name} | {tensors} | {layout} | {' | '.join(cells)} | {where}; on a GPU: {GPU} |"


def rendered() -> str:
    """The document."""
    titles = ["format", "tensors of a projection", "in the engine that is tried", *PATHS, "proved where"]
    table = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles), *map(line, FORMATS)]
    return HEAD + "\n".join(table) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(rendered())
