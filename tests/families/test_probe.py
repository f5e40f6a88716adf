"""`graft probe` on a real engine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.bridge import EngineDescription
from schemas.model import Treatment
from tests.families.models import make_family, quantise_w8a8, tensors_of

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long


def graft_probe(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would, from the folder of the sources."""
    return subprocess.run(
        [sys.executable, "-m", "app.cli", "probe", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_every_tensor_of_a_quantised_checkpoint(tmp_path: Path) -> None:
    """Treatments of all tensors, from an engine that serves nobody; arguments go to vLLM as they are."""
    folder = quantise_w8a8(make_family("llama", tmp_path / "plain"), tmp_path / "w8a8")
    done = graft_probe(str(folder), "--json", "--", "--enforce-eager", "--max-model-len", "256")
    assert done.returncode == 0, done.stderr[-3000:]
    found = EngineDescription.model_validate_json(done.stdout)
    tensors = {tensor.name: tensor for tensor in found.tensors}
    assert tensors.keys() == tensors_of(folder).keys()
    assert found.model.architecture == "LlamaForCausalLM"
    assert tensors["model.layers.0.mlp.down_proj.weight"].treatment is Treatment.REBUILT
    assert tensors["model.norm.weight"].treatment is Treatment.DIRECT


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    """A load that fails is status 1 with what vLLM said."""
    done = graft_probe(str(tmp_path))
    assert done.returncode == 1 and done.stdout == ""
    assert str(tmp_path) in done.stderr
