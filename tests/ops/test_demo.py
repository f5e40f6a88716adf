"""The example expert and the models made in code."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from app.demo import speaks_chat, write_zero_expert
from loaders.engine.model_folder import new_folder
from loaders.engine.toy_model import EXPERTS, VOCAB, make_toy_gptoss, make_toy_mixtral
from schemas.dtypes import Dtype
from schemas.model import ExpertTensor


def test_the_example_is_an_expert_of_zeros(tmp_path: Path) -> None:
    """The file that Graft writes by itself is read by safetensors: names, dtypes, shapes, all zero."""
    path = tmp_path / "examples" / "expert.safetensors"
    write_zero_expert(
        path,
        [
            ExpertTensor(name="w1.weight", dtype=Dtype.BF16, shape=(6, 5)),
            ExpertTensor(name="scale", dtype=Dtype.F32, shape=(3,)),
        ],
    )
    tensors = load_file(path)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == {
        "w1.weight": (torch.bfloat16, (6, 5)),
        "scale": (torch.float32, (3,)),
    }
    assert not any(tensor.any() for tensor in tensors.values())


def test_chat_is_told_from_the_model_folder(tmp_path: Path) -> None:
    """Either place of a chat template counts; a name that is no folder has none."""
    assert not speaks_chat(str(tmp_path / "org/name"))
    (tmp_path / "tokenizer_config.json").write_text("not json")
    assert not speaks_chat(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert speaks_chat(str(tmp_path))
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").touch()
    assert speaks_chat(str(tmp_path))


def test_toy_gptoss_has_the_checkpoint_format(tmp_path: Path) -> None:
    """Stacked experts in the orientation of gpt-oss, with biases and sinks, all bf16."""
    make_toy_gptoss(tmp_path / "m", hidden=64, intermediate=96)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    experts = "model.layers.1.mlp.experts."
    assert tensors[experts + "gate_up_proj"].shape == (EXPERTS, 64, 192)
    assert tensors[experts + "gate_up_proj_bias"].shape == (EXPERTS, 192)
    assert tensors[experts + "down_proj"].shape == (EXPERTS, 96, 64)
    assert tensors[experts + "down_proj_bias"].shape == (EXPERTS, 64)
    assert "model.layers.0.self_attn.sinks" in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    config = AutoConfig.from_pretrained(tmp_path / "m")
    assert (config.model_type, config.hidden_size, config.intermediate_size) == ("gpt_oss", 64, 96)
    assert config.layer_types == ["sliding_attention", "full_attention"]


def test_toy_mixtral_has_one_tensor_per_expert_and_matrix(tmp_path: Path) -> None:
    """Names and orientation are Mixtral's, and the head is not tied."""
    make_toy_mixtral(tmp_path / "m", hidden=64, intermediate=96)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    expert = "model.layers.1.block_sparse_moe.experts.7."
    assert [tuple(tensors[f"{expert}{w}.weight"].shape) for w in ("w1", "w2", "w3")] == [
        (96, 64),
        (64, 96),
        (96, 64),
    ]
    assert "lm_head.weight" in tensors


def test_a_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    """Tests that compare engines can make the same checkpoint twice."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_toy_gptoss(tmp_path / name, hidden=32, intermediate=32, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_the_toy_tokenizer_covers_all_bytes_and_ids(tmp_path: Path) -> None:
    """Any text comes back, every id of the model decodes, and the end token is the model's."""
    make_toy_mixtral(tmp_path / "m", hidden=32, intermediate=32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    text = "banana Ünïcödé → 漢字\n\t\0 end"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == VOCAB
    assert all(tokenizer.convert_ids_to_tokens(i) is not None for i in range(VOCAB))
    assert AutoConfig.from_pretrained(tmp_path / "m").eos_token_id == tokenizer.eos_token_id


def test_a_model_folder_is_whole_or_absent(tmp_path: Path) -> None:
    """Whoever is stopped in the middle leaves nothing under the final name, and no draft."""
    with pytest.raises(RuntimeError), new_folder(tmp_path / "m") as draft:
        (draft / "config.json").touch()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "m") as draft:
        (draft / "config.json").touch()
        assert not (tmp_path / "m").exists()
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["config.json"]
    with pytest.raises(FileExistsError), new_folder(tmp_path / "m"):
        pass
