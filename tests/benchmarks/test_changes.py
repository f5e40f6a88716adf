"""Changes of a checkpoint as bodies, what is said of where they lie, and the moves tried on a device."""

import json

import pytest
import torch
from safetensors.torch import load

import benchmarks.cuda_apply as cuda_apply
from benchmarks.changes import dense_body, differing, drawn, shaken, sparse_body
from benchmarks.real_delta import kind_of, spread_of
from loaders.header import HeaderLimits, parse_header

OLD = {
    "model.norm.weight": torch.tensor([1.0, 0.0, -2.0, 3.0], dtype=torch.bfloat16),
    "model.layers.0.self_attn.q_proj.weight": torch.ones((4, 32), dtype=torch.bfloat16),
}


def test_drawn_positions_are_in_range_and_without_repeats() -> None:
    """Also where a share gives no whole number of elements, and at least one of each tensor."""
    tensors = {"a": torch.zeros(1009), "b": torch.zeros(3)}
    for share in (1e-4, 0.01, 0.3, 0.7):
        for name, found in drawn(tensors, share).items():
            assert 1 <= found.numel() <= max(1, share * tensors[name].numel())
            assert found.unique().numel() == found.numel()
            assert int(found.min()) >= 0 and int(found.max()) < tensors[name].numel()


def test_differing_sees_bits() -> None:
    """Zero and minus zero differ, NaN does not from itself; equal tensors are left out."""
    new = {name: tensor.clone() for name, tensor in OLD.items()}
    new["model.norm.weight"][1] = -0.0
    old = dict(OLD) | {"nan": torch.tensor([float("nan")], dtype=torch.bfloat16)}
    found = differing(old, new | {"nan": old["nan"].clone()})
    assert {name: positions.tolist() for name, positions in found.items()} == {"model.norm.weight": [1]}


def test_bodies_hold_what_they_say() -> None:
    """Applying the sparse body's values at its positions gives the new weights; the dense one is them."""
    new = shaken(OLD, 1.5)
    positions = differing(OLD, new)
    body = sparse_body(new, positions)
    header = parse_header(body, HeaderLimits())
    parts, patched = load(body), {name: tensor.clone() for name, tensor in OLD.items()}
    for entry in json.loads(header.metadata["patches"]):
        patched[entry["name"]].view(-1)[parts[entry["indices"]].long()] = parts[entry["values"]]
    assert all(torch.equal(patched[name], tensor) for name, tensor in new.items())
    assert all(torch.equal(found, new[name]) for name, found in load(dense_body(new)).items())


def test_where_changes_lie() -> None:
    """Neighbours, cache lines and rows are counted over the elements of each kind."""
    new = {name: tensor.clone() for name, tensor in OLD.items()}
    new["model.layers.0.self_attn.q_proj.weight"][1, :3] = 2.0
    found = spread_of(OLD, new)
    attention = found["attention"]
    assert (attention.changed, attention.elements) == (3, 128)
    assert attention.neighbours == pytest.approx(2 / 3)
    assert (attention.lines, attention.rows) == (0.25, 0.25)
    assert found["norms"].changed == 0 and found["all"].elements == 132


def test_kinds_of_tensors() -> None:
    """An expert's matrix is no attention, whatever it is called."""
    names = {
        "model.layers.1.block_sparse_moe.experts.3.w1.weight": "experts",
        "model.layers.1.block_sparse_moe.gate.weight": "routers",
        "model.layers.1.self_attn.o_proj.weight": "attention",
        "model.layers.1.input_layernorm.weight": "norms",
        "model.embed_tokens.weight": "embedding",
    }
    assert {name: kind_of(name) for name in names} == names


def test_moves_on_a_device_are_tried_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every kind is written and put back bit for bit, with one line of JSON each."""
    monkeypatch.setattr(cuda_apply, "_TRIED", 1 << 20)
    assert cuda_apply.main(["--device", "cpu"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 12 and len({line["name"] for line in lines}) == 12
    assert all(line["met"] is True and line["ratio"] > 0 for line in lines)


def test_no_cuda_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says so, and nothing is measured on something else."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_apply.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "no CUDA device" in printed.err
