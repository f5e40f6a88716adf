"""Toy checkpoints for tests: tiny mixtures of experts with seeded weights and a byte tokenizer.

Every weight is drawn so that each part of the model moves the greedy tokens: a wrong
expert, bias, sink or norm shows in the text.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GptOssConfig, MixtralConfig, PreTrainedTokenizerFast

from loaders.engine.model_folder import write_model_folder

LAYERS, EXPERTS, TOP_K = 2, 8, 2
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
VOCAB = 320
SPECIALS = ("<|end|>", "<|pad|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of `VOCAB` tokens made in code: 256 bytes, 60 syllables, 4 special tokens."""
    syllables = [(c, v) for c in "bcdfghlmnrst" for v in "aeiou"]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet()) + [c + v for c, v in syllables]
    bpe = models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=syllables)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIALS[0], pad_token=SPECIALS[1])
    fast.chat_template = CHAT_TEMPLATE
    return fast


class _Draw:
    """Seeded bf16 tensors."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self._generator) * std + mean).to(torch.bfloat16)

    def linear(self, outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        """Weight [outputs, inputs] that multiplies the size of its input by `gain`."""
        return self(outputs, inputs, std=gain / inputs**0.5)


def _backbone(draw: _Draw, hidden: int) -> dict[str, torch.Tensor]:
    """All tensors but those of the mixtures: embedding, attention, norms, untied head."""
    tensors = {
        "model.embed_tokens.weight": draw(VOCAB, hidden, std=1.0),
        "model.norm.weight": draw(hidden, std=0.1, mean=1.0),
        "lm_head.weight": draw.linear(VOCAB, hidden, gain=3.0),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        tensors[attention + "q_proj.weight"] = draw.linear(HEADS * HEAD_DIM, hidden, gain=1.5)
        tensors[attention + "k_proj.weight"] = draw.linear(KV_HEADS * HEAD_DIM, hidden, gain=1.5)
        tensors[attention + "v_proj.weight"] = draw.linear(KV_HEADS * HEAD_DIM, hidden, gain=2.0)
        tensors[attention + "o_proj.weight"] = draw.linear(hidden, HEADS * HEAD_DIM, gain=1.5)
        tensors[prefix + "input_layernorm.weight"] = draw(hidden, std=0.1, mean=1.0)
        tensors[prefix + "post_attention_layernorm.weight"] = draw(hidden, std=0.1, mean=1.0)
    return tensors


def make_toy_gptoss(path: Path, *, hidden: int, intermediate: int, seed: int = 0) -> None:
    """Write a gpt-oss checkpoint in bf16: stacked experts with biases, sinks, alternating windows.

    `hidden` and `intermediate` must be multiples of 32 for vLLM's CPU kernels.
    Raises FileExistsError when `path` exists.
    """
    draw = _Draw(seed)
    tensors = _backbone(draw, hidden)
    for layer in range(LAYERS):
        attention = f"model.layers.{layer}.self_attn."
        for name, size in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{attention}{name}_proj.bias"] = draw(size * HEAD_DIM, std=0.3)
        tensors[attention + "o_proj.bias"] = draw(hidden, std=0.3)
        tensors[attention + "sinks"] = draw(HEADS, std=1.0)
        mlp = f"model.layers.{layer}.mlp."
        tensors[mlp + "router.weight"] = draw.linear(EXPERTS, hidden)
        tensors[mlp + "router.bias"] = draw(EXPERTS, std=0.3)
        experts = mlp + "experts."
        tensors[experts + "gate_up_proj"] = draw(EXPERTS, hidden, 2 * intermediate, std=1.0 / hidden**0.5)
        tensors[experts + "gate_up_proj_bias"] = draw(EXPERTS, 2 * intermediate, std=0.3)
        tensors[experts + "down_proj"] = draw(EXPERTS, intermediate, hidden, std=1.5 / intermediate**0.5)
        tensors[experts + "down_proj_bias"] = draw(EXPERTS, hidden, std=0.3)
    tokenizer = byte_tokenizer()
    config = GptOssConfig(
        architectures=["GptOssForCausalLM"],
        dtype="bfloat16",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=LAYERS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        sliding_window=32,
        max_position_embeddings=8192,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    write_model_folder(path, config, tokenizer, tensors)


def make_toy_mixtral(path: Path, *, hidden: int, intermediate: int, seed: int = 0) -> None:
    """Write a Mixtral checkpoint in bf16: one tensor per expert and matrix, head not tied.

    `hidden` and `intermediate` must be multiples of 32 for vLLM's CPU kernels.
    Raises FileExistsError when `path` exists.
    """
    draw = _Draw(seed)
    tensors = _backbone(draw, hidden)
    for layer in range(LAYERS):
        mixture = f"model.layers.{layer}.block_sparse_moe."
        tensors[mixture + "gate.weight"] = draw.linear(EXPERTS, hidden)
        for expert in range(EXPERTS):
            prefix = f"{mixture}experts.{expert}."
            tensors[prefix + "w1.weight"] = draw.linear(intermediate, hidden)
            tensors[prefix + "w2.weight"] = draw.linear(hidden, intermediate, gain=2.0)
            tensors[prefix + "w3.weight"] = draw.linear(intermediate, hidden)
    tokenizer = byte_tokenizer()
    config = MixtralConfig(
        architectures=["MixtralForCausalLM"],
        dtype="bfloat16",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=LAYERS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    write_model_folder(path, config, tokenizer, tensors)
