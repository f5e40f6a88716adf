"""`graft probe`: what it prints, its status, and a load that fails; the engine is a script."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app import cli, probe
from app.commands import serving
from app.supported import InstalledVllm, UnsupportedVllmError
from schemas.bridge import EngineDescription, ParallelLayout
from schemas.dtypes import Dtype
from schemas.model import CheckpointTensor, ModelInfo, Treatment

Probe = Callable[..., tuple[object, str, str]]
LAYER = "model.layers.{}.mlp.experts.{}.w1.weight"


def tensor(
    name: str,
    treatment: Treatment = Treatment.DIRECT,
    dtype: Dtype = Dtype.BF16,
    reason: str | None = None,
    runtime_dtype: Dtype | None = None,
    tied_to: str | None = None,
    loaded: bool = True,
) -> CheckpointTensor:
    return CheckpointTensor(
        name=name,
        dtype=dtype,
        shape=(2,),
        treatment=treatment,
        reason=reason,
        runtime_dtype=runtime_dtype,
        tied_to=tied_to,
        loaded=loaded,
    )


def described(*tensors: CheckpointTensor) -> EngineDescription:
    model = ModelInfo(model="m", architecture="Toy", dtype="bfloat16", quantization=None, layers=2, experts=2)
    return EngineDescription(
        vllm_version="0.32.0", torch_version="2", parallel=ParallelLayout(), model=model, tensors=tensors
    )


@pytest.fixture
def graft_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Probe:
    """`graft probe` with a module of the given text in the engine's place; status, stdout and stderr."""

    def run(script: str, *arguments: str) -> tuple[object, str, str]:
        (tmp_path / "standin.py").write_text(script)
        monkeypatch.setattr(probe, "COMMAND", "standin")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("COLUMNS", "40")  # of no terminal: a pipe gets whole lines all the same
        monkeypatch.setattr(sys, "argv", ["graft", "probe", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run


def printing(found: EngineDescription) -> str:
    return f"import sys\nprint('noise', file=sys.stderr)\nprint({found.model_dump_json()!r})"


def test_tensors_that_are_alike_are_one_row() -> None:
    """Numbers of layers and experts do not tell tensors apart; treatment, dtypes and reason do."""
    found = [tensor(LAYER.format(layer, expert)) for layer in range(2) for expert in range(2)]
    found += [
        tensor("model.layers.0.norm.weight"),
        tensor("model.layers.1.norm.weight", Treatment.REBUILT),
        tensor("model.layers.0.a.weight", Treatment.UNSUPPORTED, reason="model.layers.0.a holds other state"),
        tensor("model.layers.1.a.weight", Treatment.UNSUPPORTED, reason="model.layers.1.a holds other state"),
        tensor("model.layers.2.a.weight", Treatment.UNSUPPORTED, reason="no probe is known"),
        tensor("model.layers.0.b.weight", runtime_dtype=Dtype.F32),
        tensor("model.layers.1.b.weight", dtype=Dtype.F32),
    ]
    assert [(pattern, count, first.name) for pattern, count, first in probe.summary(found)] == [
        ("model.layers.*.mlp.experts.*.w1.weight", 4, LAYER.format(0, 0)),
        ("model.layers.*.norm.weight", 1, "model.layers.0.norm.weight"),
        ("model.layers.*.norm.weight", 1, "model.layers.1.norm.weight"),
        ("model.layers.*.a.weight", 2, "model.layers.0.a.weight"),
        ("model.layers.*.a.weight", 1, "model.layers.2.a.weight"),
        ("model.layers.*.b.weight", 1, "model.layers.0.b.weight"),
        ("model.layers.*.b.weight", 1, "model.layers.1.b.weight"),
    ]
    assert probe.summary([]) == []


def test_all_can_be_updated(graft_probe: Probe) -> None:
    """A table of patterns with what they run as and what they are tied to, and status 0."""
    found = described(
        *(tensor(LAYER.format(layer, 0), Treatment.REBUILT) for layer in range(2)),
        tensor("norm.weight", dtype=Dtype.F32, runtime_dtype=Dtype.BF16),
        tensor("lm_head.weight", tied_to="embed.weight"),
    )
    status, out, _ = graft_probe(printing(found), "m")
    assert status == 0
    rows = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    assert "Toy on vLLM 0.32.0" in rows
    assert "model.layers.*.mlp.experts.*.w1.weight 2 BF16 rebuilt" in rows
    assert "norm.weight 1 F32 BF16 direct" in rows
    assert "lm_head.weight 1 BF16 direct one with embed.weight" in rows
    assert "noise" not in out


@pytest.mark.parametrize("treatment", list(Treatment))
def test_json_has_every_tensor(graft_probe: Probe, treatment: Treatment) -> None:
    """With --json the document is all that is printed; status 2 if something cannot be updated."""
    found = described(tensor("a.weight"), tensor("b.weight", treatment, reason="because"))
    status, out, _ = graft_probe(printing(found), "m", "--json")
    assert EngineDescription.model_validate(json.loads(out)) == found
    assert status == (2 if treatment is Treatment.UNSUPPORTED else 0)


def test_an_unsupported_tensor_is_shown_with_its_reason(graft_probe: Probe) -> None:
    """The table says why, and the status is 2."""
    found = described(tensor("a.weight", Treatment.UNSUPPORTED, reason="no probe is known for A"))
    status, out, _ = graft_probe(printing(found), "m")
    assert status == 2 and "no probe is known for A" in out


def test_a_pipe_gets_whole_lines(graft_probe: Probe) -> None:
    """However long a reason is, its row stays one line where no terminal would cut it."""
    long = tensor("a.weight", Treatment.UNSUPPORTED, reason="because " * 200)
    _, out, _ = graft_probe(printing(described(long, tensor("b" * 5000))), "m")
    (row,) = (line for line in out.splitlines() if line.strip(" │").startswith("a.weight"))
    assert row.count("because") == 200
    assert any("b" * 5000 in line for line in out.splitlines())


def test_what_the_engine_does_not_load_is_no_failure(graft_probe: Probe) -> None:
    """Tensors of the checkpoint that no engine of this kind would use are listed, and the status is 0."""
    unused = tensor("g_idx", Treatment.UNSUPPORTED, reason="the engine does not load it", loaded=False)
    status, out, _ = graft_probe(printing(described(tensor("a.weight"), unused)), "m")
    assert status == 0 and "the engine does not load it" in out


def test_a_load_that_fails_shows_its_end(graft_probe: Probe) -> None:
    """Status 1, and the last lines of what the engine said."""
    script = "import sys\nfor n in range(30): print('line', n, file=sys.stderr)\nsys.exit('no such model')"
    status, out, err = graft_probe(script, "m")
    assert status == 1 and out == ""
    assert err.splitlines()[-1] == "no such model"
    assert "line 29" in err and "line 18" not in err


def test_a_load_that_fails_is_a_document_for_programs(graft_probe: Probe) -> None:
    """With --json what went wrong is JSON, too, as of the other commands."""
    status, out, err = graft_probe("import sys\nsys.exit('no such model')", "m", "--json")
    assert (status, out, json.loads(err)) == (1, "", {"exit": 1, "detail": "no such model"})


def test_what_the_engine_is_told(graft_probe: Probe) -> None:
    """The model, and what stands after `--` as it is."""
    script = "import sys\nsys.exit(repr(sys.argv[1:]))"
    _, _, err = graft_probe(script, "m", "--", "--dtype", "float32", "--json")
    assert repr(["m", "--dtype", "float32", "--json"]) in err


@pytest.mark.parametrize("given", [None, "7"])
def test_room_for_the_cache_on_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """On CPUs vLLM would take half of the memory for its cache; what the user set stays."""
    (tmp_path / "standin.py").write_text(
        "import os, sys; sys.exit(os.environ.get('VLLM_CPU_KVCACHE_SPACE', 'none'))"
    )
    monkeypatch.setattr(probe, "COMMAND", "standin")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if given:
        environ["VLLM_CPU_KVCACHE_SPACE"] = given
    for cpu, expected in ((True, given or "1"), (False, given or "none")):
        with pytest.raises(probe.ProbeError, match=expected):
            probe.run_probe("m", (), InstalledVllm("0.32.0", cpu), environ)


def test_without_vllm_nothing_is_started(graft_probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing vLLM is one line and status 1."""

    def missing() -> None:
        raise UnsupportedVllmError("vLLM is not installed")

    monkeypatch.setattr(serving, "installed_vllm", missing)
    status, _, err = graft_probe("raise AssertionError", "m")
    assert (status, err) == (1, "graft: vLLM is not installed\n")
