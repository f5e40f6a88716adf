"""Models for the rows: vLLM's own gpt-oss of any size, built in this process without an engine or weights."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import nn
from transformers import GptOssConfig
from vllm import EngineArgs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
    model_parallel_is_initialized,
)
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from loaders.engine.atlas import Atlas, build_atlas
from loaders.engine.checkpoint import Checkpoint
from loaders.engine.workshop import Workshop

HEAD_DIM, HEADS, KV_HEADS = 64, 64, 8


@dataclass(frozen=True, slots=True)
class Size:
    """Shapes of a gpt-oss in bf16."""

    layers: int
    experts: int
    hidden: int
    intermediate: int
    vocab: int

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint tensors and their shapes, as Hugging Face's bf16 folders have them."""
        hidden, inner = self.hidden, self.intermediate
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, hidden),
            "model.norm.weight": (hidden,),
            "lm_head.weight": (self.vocab, hidden),
        }
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                shapes[f"{attention}{name}_proj.weight"] = (heads * HEAD_DIM, hidden)
                shapes[f"{attention}{name}_proj.bias"] = (heads * HEAD_DIM,)
            shapes |= {
                f"{attention}o_proj.weight": (hidden, HEADS * HEAD_DIM),
                f"{attention}o_proj.bias": (hidden,),
                f"{attention}sinks": (HEADS,),
                f"{prefix}input_layernorm.weight": (hidden,),
                f"{prefix}post_attention_layernorm.weight": (hidden,),
                f"{mlp}router.weight": (self.experts, hidden),
                f"{mlp}router.bias": (self.experts,),
                f"{mlp}experts.gate_up_proj": (self.experts, hidden, 2 * inner),
                f"{mlp}experts.gate_up_proj_bias": (self.experts, 2 * inner),
                f"{mlp}experts.down_proj": (self.experts, inner, hidden),
                f"{mlp}experts.down_proj_bias": (self.experts, hidden),
            }
        return shapes


GPT_OSS_120B = Size(layers=36, experts=128, hidden=2880, intermediate=2880, vocab=201088)
"""As its published configuration says."""


def write_folder(folder: Path, size: Size) -> None:
    """A checkpoint folder whose data is a hole in a file: it takes no room, and reads as zeros."""
    folder.mkdir(parents=True)
    GptOssConfig(
        architectures=["GptOssForCausalLM"],
        dtype="bfloat16",
        num_hidden_layers=size.layers,
        num_local_experts=size.experts,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        vocab_size=size.vocab,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
    ).save_pretrained(folder)
    entries, end = {}, 0
    for name, shape in size.tensors().items():
        begin, end = end, end + 2 * prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


def configured(folder: Path) -> VllmConfig:
    """vLLM's configuration for the folder, on one rank of this process."""
    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=256
    ).create_engine_config()
    if not model_parallel_is_initialized():
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{folder / 'meeting'}", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
    return config


def fill(model: nn.Module) -> None:
    """Seeded weights of a usual size, without the time that a normal distribution takes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.05, 0.05, generator=generator)


class Loaded:
    """A model as vLLM loads it into one rank, with made-up weights."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder = folder
        write_folder(folder, size)
        self.config = configured(folder)
        with self._context():
            self.model: nn.Module = initialize_model(
                vllm_config=self.config, model_config=self.config.model_config
            )
        fill(self.model)

    def process(self) -> None:
        """What vLLM does after loading: on a CPU, experts are repacked."""
        with self._context():
            process_weights_after_loading(self.model, self.config.model_config, torch.device("cpu"))

    def atlas(self) -> Atlas:
        """The ways into it, of a model that was processed."""
        checkpoint = Checkpoint.open(self.folder)
        return build_atlas(self.config, self.model, checkpoint, Workshop(self.config))

    @contextmanager
    def _context(self) -> Iterator[None]:
        with set_current_vllm_config(self.config), set_default_torch_dtype(torch.bfloat16):
            yield
