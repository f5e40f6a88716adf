"""Proofs on disk: found again when nothing changed, and only then.

Marked `vllm`, since these modules import vLLM, which takes seconds; no engine is started.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm

SIGNATURE = (("Linear", (("rank", 0),)), (("weight", (4, 3), torch.bfloat16),))


def kind(reason: str | None = None) -> Any:
    """A kind with all that one can have: a table, handles, derived tensors, views of one memory."""
    from loaders.engine.kind import Kind, ParameterKind
    from loaders.engine.spot import Spot, identity
    from schemas.model import Treatment

    table = torch.tensor([2, 0, 1], dtype=torch.int32)
    return Kind(
        {
            "weight": ParameterKind(Treatment.REBUILT, (Spot("packed", 3, 4, table), identity("weight", 12))),
            "bias": ParameterKind(Treatment.UNSUPPORTED, (), reason),
        },
        ("kernel.handle",),
        {"packed": torch.bfloat16, "sums": torch.float32, "@0.W_UV": torch.bfloat16},
        frozenset({("packed", "@0.W_UV"), ("sums",)}),
        ("sums",),
    )


def same(one: Any, other: Any) -> bool:
    """Equal but for tensors, which are compared by their elements."""
    pairs = zip(one.parameters.values(), other.parameters.values(), strict=True)
    spots = [pair for a, b in pairs for pair in zip(a.spots, b.spots, strict=True)]
    return (
        [(n, p.treatment, p.reason) for n, p in one.parameters.items()]
        == [(n, p.treatment, p.reason) for n, p in other.parameters.items()]
        and all((a.path, a.src_block, a.dst_block) == (b.path, b.src_block, b.dst_block) for a, b in spots)
        and all(a.table is b.table or torch.equal(a.table, b.table) for a, b in spots)
        and (one.handles, one.tensors, one.sharing, one.derived)
        == (other.handles, other.tensors, other.sharing, other.derived)
    )


def proofs(folder: Path, engine: str = "engine") -> Any:
    from loaders.engine.proofs import Proofs

    return Proofs(folder / "proofs", engine)


def test_kept_and_found_by_another(tmp_path: Path) -> None:
    """What one start has learned the next one has, to the last element of a table."""
    assert proofs(tmp_path).find(SIGNATURE) is None
    proofs(tmp_path).keep(SIGNATURE, kind("because"))
    assert same(proofs(tmp_path).find(SIGNATURE), kind("because"))
    assert len(list((tmp_path / "proofs").iterdir())) == 1


def test_another_module_or_engine_finds_nothing(tmp_path: Path) -> None:
    """A proof holds for its signature on its engine."""
    proofs(tmp_path).keep(SIGNATURE, kind())
    other = (SIGNATURE[0], (("weight", (4, 4), torch.bfloat16),))
    assert proofs(tmp_path).find(other) is None
    assert proofs(tmp_path, "another").find(SIGNATURE) is None


@pytest.mark.parametrize(
    "damage", [b"", b"\x08", b"{}", b"\xff" * 64], ids=["empty", "short", "text", "noise"]
)
def test_a_damaged_file_is_as_none(tmp_path: Path, damage: bytes) -> None:
    """It is learned again, and the file written anew."""
    proofs(tmp_path).keep(SIGNATURE, kind())
    (file,) = (tmp_path / "proofs").iterdir()
    file.write_bytes(damage)
    assert proofs(tmp_path).find(SIGNATURE) is None
    proofs(tmp_path).keep(SIGNATURE, kind())
    assert same(proofs(tmp_path).find(SIGNATURE), kind())


def test_no_room_for_proofs(tmp_path: Path) -> None:
    """A folder that cannot be made costs time at the next start, nothing else."""
    (tmp_path / "proofs").write_text("not a folder")
    proofs(tmp_path).keep(SIGNATURE, kind())
    assert proofs(tmp_path).find(SIGNATURE) is None


def test_a_dtype_that_no_file_can_name(tmp_path: Path) -> None:
    """State in a dtype that safetensors lacks is learned at every start; the engine serves nevertheless."""
    found = kind()
    found.tensors["turns"] = torch.complex64
    proofs(tmp_path).keep(SIGNATURE, found)
    assert proofs(tmp_path).find(SIGNATURE) is None


def config(**changes: Any) -> Any:
    """The part of vLLM's configuration that a key is made from."""
    members = {"dtype": torch.bfloat16, "quantization": None, "kernels": "auto"} | changes
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=members["dtype"],
            hf_config=SimpleNamespace(quantization_config=members["quantization"]),
        ),
        kernel_config=members["kernels"],
    )


CHANGES: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": torch.float32},
    "quantisation": {"quantization": {"quant_method": "compressed-tensors"}},
    "kernels": {"kernels": "triton"},
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_key_of_an_engine_follows_its_configuration(what: str) -> None:
    """The same configuration has the same key, another one another."""
    from loaders.engine.proofs import engine_key

    assert engine_key(config()) == engine_key(config())
    assert engine_key(config()) != engine_key(config(**CHANGES[what]))


@pytest.mark.parametrize("name", ["vllm_version", "_own_code", "_cpu", "_gpus"])
def test_the_key_of_an_engine_follows_what_it_runs_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's version, Graft's own code, the CPU and the GPUs count."""
    import loaders.engine.proofs as module

    before = module.engine_key(config())
    monkeypatch.setattr(module, name, lambda: ["another"])
    assert module.engine_key(config()) != before


def test_variables_that_choose_kernels_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not those that vLLM fills anew at every start."""
    from loaders.engine.proofs import engine_key

    before = engine_key(config())
    monkeypatch.setenv("VLLM_DIST_IDENT", "another")
    assert engine_key(config()) == before
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert engine_key(config()) != before
