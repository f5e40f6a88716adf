"""Every family and quantisation on an NVIDIA GPU, with vLLM's own kernels; run by `make test-gpu` only."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families.repacking.cases import CASES
from tests.families.repacking.functions import Case
from tests.families.rows import ROWS, Spec
from tests.families.running import Found, run_rows

pytestmark = pytest.mark.gpu
MEMORY = {"gpu_memory_utilization": 0.4}
"""Room for what an engine that has just ended may still hold."""
GPU_ROWS = {
    name: replace(spec, options=spec.options | MEMORY, generates=True)
    for name, spec in ROWS.items()
    if not spec.options.keys() & {"tensor_parallel_size", "pipeline_parallel_size"}
}
"""All that fit one GPU: there, vLLM generates in each, and nothing is replaced by a reference."""


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    """Ends the run where there is no GPU, or a vLLM that is not built for it: nothing passes unseen."""
    if not torch.cuda.is_available():
        pytest.exit("make test-gpu needs an NVIDIA GPU: torch sees none here", returncode=1)
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        pytest.exit("make test-gpu needs vLLM for CUDA: `make setup-gpu` installs it", returncode=1)


class Rows:
    """Runs each row when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, Found] = {}

    def row(self, name: str, spec: Spec) -> Found:
        """What was found for the row. Fails the test if it could not be run."""
        if name not in self._found:
            folder = self._folder / str(len(self._found))
            folder.mkdir()
            self._found |= run_rows({name: spec}, folder)
        assert "error" not in self._found[name], self._found[name]["error"]
        return self._found[name]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return Rows(tmp_path_factory.mktemp("gpu"))


@pytest.fixture(params=GPU_ROWS)
def found(request: pytest.FixtureRequest, rows: Rows) -> Found:
    return rows.row(request.param, GPU_ROWS[request.param])


def test_identity(found: Found) -> None:
    """The whole checkpoint loaded again three times, and expert by expert: nothing changes."""
    assert found["identity"] and found["identity_again"] and found["identity_thrice"]
    assert found["experts_one_by_one"]


def test_changes_equal_a_fresh_engine(found: Found) -> None:
    """Sparse and dense changes are as if loaded so, and change what the engine says."""
    assert found["changes_answers"]
    assert found["differ"] == [] and found["digests_as_fresh"] and found["answers_as_fresh"]


def test_rollback(found: Found) -> None:
    """Ten commits on one tensor and back, then back to the start: bit for bit."""
    assert found["ten_on_one_and_back"] and found["rollback"]


def test_what_is_refused_is_not_loaded(found: Found) -> None:
    """Whatever the engine loads can be updated; the reason of the first that can't is shown."""
    reasons = {reason for ranks in found["refused"].values() for reason in ranks}
    assert reasons <= {"the engine does not load it"}


ON_GPU = [case for case in CASES if not case.name.startswith("oracle.w4a8_int8.")]
"""All but those of a kernel that there is for CPUs alone."""


@pytest.fixture(params=ON_GPU, ids=[case.title for case in ON_GPU])
def served(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from tests.families.repacking.rig import Served, drawn

    case: Case = request.param
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "cache"))
    yield Served(case, drawn(case, 1), tmp_path)


def test_functions_that_rearrange_weights(served: Any) -> None:
    """What is tried on the CPU holds on the GPU, with nothing in the place of an operation."""
    from tests.families.repacking.rig import rounds

    rounds(served)
