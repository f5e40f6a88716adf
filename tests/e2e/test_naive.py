"""vLLM's own ways beside Graft's on the same engine: a vLLM release that mends one is noticed here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.weights import Weights


@pytest.fixture(scope="module")
def found(gptoss_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tokens before and after each way."""
    scratch = tmp_path_factory.mktemp("naive")
    changed = Weights(gptoss_model)
    for name, tensor in changed.tensors.items():
        if ".experts." in name:
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
            tensor.copy_((tensor.float() + noise * float(tensor.float().std())).to(tensor.dtype))
    folder = changed.save(scratch / "changed")
    script = Path(__file__).parent / "naive_ways.py"
    run = subprocess.run(
        [sys.executable, str(script), str(gptoss_model), str(folder), str(scratch)],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=Path(__file__).parents[2],
        check=False,
        env=None,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("way", ["stream_expert", "patch_expert", "reload_expert"])
def test_s5_own_weights_survive_graft_and_not_the_naive_way(found: Any, way: str) -> None:
    """The model's own weights sent again: the same tokens through Graft, others through vLLM's way."""
    assert found[way]["graft"] == found[way]["first"]
    assert found[way]["naive"] != found[way]["first"]


def test_addresses_of_live_tensors_stay(found: Any) -> None:
    """Commit and rollback of every tensor move no runtime tensor, so captured graphs stay valid."""
    assert found["addresses"]["tensors"] > 20
    assert found["addresses"]["moved"] == []
    assert found["addresses"]["same"]


def test_s5_reload_from_changed_file_is_not_the_changed_model(found: Any) -> None:
    """vLLM's reload from a folder with other experts reports success and serves something else."""
    assert found["reload_changed"]["fresh"] != found["reload_changed"]["first"]
    assert found["reload_changed"]["naive"] != found["reload_changed"]["fresh"]
