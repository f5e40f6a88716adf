"""vLLM's functions that rearrange weights, behind Graft: learned or made anew, and never silently wrong."""

import importlib.util
import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families.repacking.cases import CASES
from tests.families.repacking.document import DOCUMENT, document
from tests.families.repacking.elsewhere import (
    BY_BACKEND,
    BY_ENGINE,
    GPU,
    NOT_WEIGHTS,
    OTHER_CPUS,
    Elsewhere,
)
from tests.families.repacking.functions import Case, all_functions, resolve

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def rig() -> Any:
    from tests.families.repacking import rig as module

    return module


@pytest.fixture(params=CASES, ids=[case.title for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture
def served(rig: Any, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "cache"))
    yield rig.Served(case, rig.drawn(case, 1), tmp_path)


def test_treatments_and_three_rounds(rig: Any, case: Case, served: Any) -> None:
    """Own weights change nothing; changed ones equal the function run afresh; back bit for bit; thrice."""
    assert served.treatments == {name: (case.treatment_of(name), None) for name in case.parameters}
    rig.rounds(served)


def test_every_function_is_accounted_for() -> None:
    """All that vLLM has for rearranging weights is tried here, or is listed with where it is tried."""
    listed = [
        *{case.name for case in CASES},
        *(one.name for one in (*GPU, *OTHER_CPUS)),
        *NOT_WEIGHTS,
        *BY_BACKEND,
        *BY_ENGINE,
    ]
    assert [name for name, count in Counter(listed).items() if count > 1] == []
    assert set(all_functions()) == set(listed)


@pytest.mark.parametrize("listed", (*GPU, *OTHER_CPUS), ids=lambda listed: listed.name)
def test_what_is_listed_as_elsewhere_wants_what_it_says(listed: Elsewhere) -> None:
    """Its source names the library, the operation, or another function of the list."""
    source = inspect.getsource(resolve(listed.name))
    assert listed.needs in source.partition("(")[2]


def test_what_is_listed_as_elsewhere_is_not_here() -> None:
    """Libraries and operations of GPUs are missing; where vLLM has them, these tests have to try them."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON
    from vllm.utils.deep_gemm import has_deep_gemm

    if not current_platform.is_cpu():
        pytest.skip("vLLM is not built for the CPU here")
    current_platform.import_kernels()
    functions = {one.name.rpartition(".")[2] for one in GPU if not one.name.startswith("custom_ops.")}
    for needs in {one.needs for one in GPU} - functions:
        if needs == "_missing":
            assert not has_deep_gemm()
        elif needs == "tl.":
            assert not HAS_TRITON
        else:
            assert importlib.util.find_spec(needs) is None and not hasattr(torch.ops._C, needs)


def test_the_document_is_true() -> None:
    """docs/repacking.md says what these lists say."""
    assert DOCUMENT.read_text() == document()
