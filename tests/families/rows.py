"""Which models are tried in which way: a row is a checkpoint, made in code, and how the engine runs it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loaders.engine.toy_model import EXPERTS
from tests.families.models import add_adapter, make_family, quantise_mxfp4, quantise_w8a8, retie, shard
from tests.families.quantised import quantise_experts, quantise_quark

Make = Callable[[Path], object]


@dataclass(frozen=True)
class Spec:
    """A row: `make` writes the checkpoint; those that are not `always` run in `make test-all` alone."""

    make: Make
    options: dict[str, Any] = field(default_factory=dict)
    always: bool = False
    generates: bool = True
    """Whether vLLM's CPU engine can generate in this layout; if not, digests alone tell."""
    owner: Callable[[int, int], list[int]] | None = None
    """Ranks that hold the expert of that number in that layer; none: all."""
    reference: bool = False
    """Whether it needs one of the operations in `reference`."""
    not_loaded: tuple[str, ...] = ()
    """Ends of names of what vLLM itself leaves in the checkpoint."""
    may_stay: tuple[str, ...] = ()
    """Ends of names of what is derived from a few elements only, and so may be the same after a change."""


def _family(name: str, dtype: str = "bfloat16", **members: Any) -> Make:
    return lambda path: make_family(name, path, dtype=dtype, **members)


def _w8a8(path: Path) -> None:
    quantise_w8a8(make_family("llama", path.with_name(f"{path.name}-plain")), path)


def _retied(path: Path) -> None:
    retie(make_family("llama-tied", path.with_name(f"{path.name}-plain")), path)


def _mxfp4(path: Path) -> None:
    quantise_mxfp4(make_family("gpt-oss", path.with_name(f"{path.name}-plain")), path)


def _quantised(name: str) -> Make:
    return lambda path: quantise_experts(
        make_family("qwen3-moe", path.with_name(f"{path.name}-plain")), path, name
    )


def _quark(name: str) -> Make:
    return lambda path: quantise_quark(
        make_family("gpt-oss", path.with_name(f"{path.name}-plain")), path, name
    )


def _adapted(path: Path) -> None:
    add_adapter(make_family("llama", path))


def _sharded(path: Path) -> None:
    shard(make_family("qwen3-moe", path))


_TP2: dict[str, Any] = {"tensor_parallel_size": 2}
_EP2: dict[str, Any] = _TP2 | {"enable_expert_parallel": True}
_ROUND_ROBIN: dict[str, Any] = {"expert_placement_strategy": "round_robin"}
_DUMMIES = ("w13_weight_scale", "w13_scales", "w2_weight_scale", "w2_scales")
"""Scales that are dealt with while loading, in the place of which vLLM leaves a constant."""
_F32: dict[str, Any] = {"dtype": "float32"}


def _linear(expert: int, layer: int) -> list[int]:
    return [expert // (EXPERTS // 2)]


def _round_robin(expert: int, layer: int) -> list[int]:
    return [expert % 2]


def _by_layer(expert: int, layer: int) -> list[int]:
    return [layer]


def _row(name: str, options: dict[str, Any] | None = None, **members: Any) -> Spec:
    """A row of quantised experts; those spread over ranks by number can only be told by digests."""
    if options == _EP2:
        members |= {"generates": False, "owner": _linear}
    return Spec(_quantised(name), options or {}, reference=True, **members)


ROWS: dict[str, Spec] = {
    "gpt-oss": Spec(_family("gpt-oss")),
    "gpt-oss float32": Spec(_family("gpt-oss", "float32"), _F32),
    "gpt-oss float32 run as bfloat16": Spec(_family("gpt-oss", "float32"), always=True),
    "gpt-oss compiled": Spec(_family("gpt-oss"), {"enforce_eager": False}, always=True),
    "gpt-oss TP=2": Spec(_family("gpt-oss"), _TP2),
    "gpt-oss MXFP4": Spec(_mxfp4, always=True, reference=True),
    "gpt-oss MXFP4 TP=2": Spec(_mxfp4, _TP2, reference=True),
    "gpt-oss MXFP4 EP=2": Spec(_mxfp4, _EP2, generates=False, owner=_linear, reference=True),
    "NVFP4": _row("NVFP4", always=True),
    "NVFP4 TP=2": _row("NVFP4", _TP2),
    "NVFP4 EP=2": _row("NVFP4", _EP2),
    "W4A16": _row("W4A16"),
    "W4A16 TP=2": _row("W4A16", _TP2),
    "W4A16 with zero points": _row("W4A16 with zero points", always=True, may_stay=_DUMMIES),
    "W4A16 with zero points TP=2": _row("W4A16 with zero points", _TP2, may_stay=_DUMMIES),
    "AWQ": _row("AWQ", may_stay=_DUMMIES),
    "AWQ TP=2": _row("AWQ", _TP2, may_stay=_DUMMIES),
    "GPTQ": _row("GPTQ", may_stay=_DUMMIES, not_loaded=(".g_idx",)),
    "FP8 by rows": _row("FP8 by rows"),
    "FP8 by rows TP=2": _row("FP8 by rows", _TP2),
    "FP8 by tensors": _row("FP8 by tensors", always=True),
    "FP8 by tensors TP=2": _row("FP8 by tensors", _TP2),
    "FP8 by blocks": _row("FP8 by blocks"),
    "FP8 by blocks TP=2": _row("FP8 by blocks", _TP2),
    "FP8 by blocks EP=2": _row("FP8 by blocks", _EP2),
    "W8A8 experts": _row("W8A8"),
    "W8A8 experts TP=2": _row("W8A8", _TP2),
    "Quark FP8": Spec(_quark("FP8"), reference=True),
    "Quark FP8 TP=2": Spec(_quark("FP8"), _TP2, reference=True),
    "Quark MXFP4": Spec(_quark("MXFP4"), reference=True, always=True),
    "Quark MXFP4 TP=2": Spec(_quark("MXFP4"), _TP2, reference=True),
    "mixtral": Spec(_family("mixtral")),
    "mixtral run as float32": Spec(_family("mixtral"), _F32),
    "mixtral TP=2": Spec(_family("mixtral"), _TP2),
    "mixtral TP=2, padded shards": Spec(_family("mixtral", intermediate_size=96), _TP2),
    "llama TP=2, uneven vocabulary": Spec(_family("llama", vocab_size=321), _TP2),
    "qwen3-moe, two files": Spec(_sharded),
    "qwen3-moe TP=2": Spec(_family("qwen3-moe"), _TP2),
    "olmoe": Spec(_family("olmoe")),
    "olmoe TP=2": Spec(_family("olmoe"), _TP2),
    "granite-moe TP=2": Spec(_family("granite-moe"), _TP2),
    "granite-moe": Spec(_family("granite-moe"), always=True),
    "qwen3-moe EP=2": Spec(_family("qwen3-moe"), _EP2, generates=False, owner=_linear),
    # vLLM 0.32 places round robin only where experts are in groups, and elsewhere linearly.
    "qwen3-moe EP=2 round robin": Spec(
        _family("qwen3-moe"), _EP2 | _ROUND_ROBIN, generates=False, owner=_linear
    ),
    "deepseek-v2 EP=2 round robin": Spec(
        _family("deepseek-v2", n_group=2, topk_group=1, topk_method="group_limited_greedy"),
        _EP2 | _ROUND_ROBIN,
        generates=False,
        owner=_round_robin,
    ),
    "gpt-oss EP=2": Spec(_family("gpt-oss"), _EP2, generates=False, owner=_linear),
    "mixtral EP=2": Spec(_family("mixtral"), _EP2, generates=False, owner=_linear),
    "qwen3-moe PP=2": Spec(
        _family("qwen3-moe"), {"pipeline_parallel_size": 2}, generates=False, owner=_by_layer
    ),
    "deepseek-v2": Spec(_family("deepseek-v2"), always=True),
    "deepseek-v2 float32": Spec(_family("deepseek-v2", "float32"), _F32),
    "deepseek-v2 TP=2": Spec(_family("deepseek-v2"), _TP2),
    "llama": Spec(_family("llama")),
    "llama compiled": Spec(_family("llama"), {"enforce_eager": False}),
    "llama with a LoRA adapter": Spec(_adapted, {"enable_lora": True, "max_lora_rank": 8}, always=True),
    "llama quantised online to fp8": Spec(
        _family("llama"), {"quantization": "fp8"}, always=True, reference=True, may_stay=("weight_scale",)
    ),
    "llama tied": Spec(_family("llama-tied")),
    "llama tied TP=2": Spec(_family("llama-tied"), _TP2),
    "llama re-tied": Spec(_retied, always=True),
    "llama W8A8": Spec(_w8a8, always=True),
    "llama W8A8 TP=2": Spec(_w8a8, _TP2),
    "qwen2": Spec(_family("qwen2")),
    "qwen2 TP=2": Spec(_family("qwen2"), _TP2),
}
