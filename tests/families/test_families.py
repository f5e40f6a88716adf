"""Every family, layout and dtype: own weights change nothing, changes equal a fresh engine, all comes back.

Tests are named after the reports that Graft was asked from. Rows share a process, as
importing vLLM takes longer than most of what is done to one.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.families import formats
from tests.families.models import make_family
from tests.families.reference import as_plugin
from tests.families.rows import ROWS
from tests.families.running import Found, run_rows
from tests.families.table import DOCUMENT, DOCUMENTED, features, line

NOT_LOADED = "the engine does not load it"
CONSTANTS = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale", "_k_scale_cpu", "_v_scale_cpu", "_expert_map")
_ALL = [pytest.param(name, marks=() if spec.always else pytest.mark.long) for name, spec in ROWS.items()]


class Rig:
    """Runs all rows of `make test`, or all others, when the first of them is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plugin = as_plugin(folder / "plugin")
        self._found: dict[str, Found] = {}

    def row(self, name: str) -> Found:
        """What was found for the row. Fails the test if it could not be run."""
        if name not in self._found:
            always = ROWS[name].always
            rows = {other: spec for other, spec in ROWS.items() if spec.always is always}
            cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
            self._found |= run_rows(rows, self._folder, PYTHONPATH=self._plugin, **cores)
        found = self._found[name]
        assert "error" not in found, found["error"]
        return found


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("families"))


@pytest.fixture(params=_ALL)
def found(request: pytest.FixtureRequest, rig: Rig) -> Found:
    return rig.row(request.param)


def test_s1_experts_one_by_one_change_nothing(found: Found) -> None:
    """Every expert of every layer sent alone with its own weights: the same digests, tokens and logprobs."""
    assert found["experts_one_by_one"]


def test_s1_ranks_say_whether_they_took_an_expert(found: Found) -> None:
    """Of every expert, exactly the ranks that hold it, or a part of it, report that they took it."""
    ranks = list(range(ROWS[found["name"]].options.get("tensor_parallel_size", 1)))
    owner = ROWS[found["name"]].owner or (lambda expert, layer: ranks)
    for expert, took in found["took"].items():
        number = int(expert.rpartition(".")[2])
        layer = int(expert.partition(".layers.")[2].partition(".")[0])
        assert took == owner(number, layer), expert


def test_s2_three_reloads_change_nothing(found: Found) -> None:
    """The whole checkpoint loaded again, and again, and again: the same digests, tokens and logprobs."""
    assert (found["identity"], found["identity_again"], found["identity_thrice"]) == (True, True, True)


def test_s4_sparse_and_dense_changes_equal_a_fresh_engine(found: Found) -> None:
    """Every tensor patched sparsely, a third of them and some experts replaced: as if loaded so."""
    assert found["changes_answers"]
    assert found["differ"] == [] and found["digests_as_fresh"] and found["answers_as_fresh"]


def test_s4_every_runtime_tensor_was_reached(found: Found) -> None:
    """After a patch to every checkpoint tensor only constants are as they were."""
    still = (*CONSTANTS, *ROWS[found["name"]].may_stay)
    assert [name for name in found["unmoved"] if not name.endswith(still)] == []


def test_s5_again_and_again_and_back(found: Found) -> None:
    """Ten commits in a row on one tensor, of several kinds, and back; then back to the start: bit for bit."""
    assert found["ten_on_one_and_back"]
    assert found["rollback"]


@pytest.mark.parametrize("row", [param for param in _ALL if param.values[0] in DOCUMENTED])
def test_the_documented_table_is_true(rig: Rig, row: str) -> None:
    """docs/treatments.md says of the row what the engine says, down to numbers on the CPU that it names."""
    counts = Counter(rig.row(row)["treatments"].values())
    document = DOCUMENT.read_text()
    if f"on a CPU with: {features()}." in document:
        assert line(row, counts, ROWS[row]) in document.splitlines()
    else:
        (said,) = (text for text in document.splitlines() if text.startswith(f"| {row} |"))
        assert int(said.split("|")[4]) == counts["unsupported"]


def test_the_table_of_formats_is_true() -> None:
    """docs/formats.md names every quantised format of the rows, and the layouts in which it is tried."""
    assert formats.DOCUMENT.read_text() == formats.rendered()
    named = {name for row in formats.FORMATS for name in ROWS if name == row or name.startswith(f"{row} ")}
    assert {name for name, spec in ROWS.items() if spec.reference or "W8A8" in name} <= named


def test_nothing_is_refused(found: Found) -> None:
    """Every checkpoint tensor of the row can be updated, but for those that vLLM does not load."""
    not_loaded = ROWS[found["name"]].not_loaded
    refused = {n: reasons for n, reasons in found["refused"].items() if not n.endswith(not_loaded)}
    assert refused == {}
    assert {reason for n, reasons in found["refused"].items() for reason in reasons} <= {NOT_LOADED}


def test_one_of_two_tied_tensors_alone_is_refused(rig: Rig) -> None:
    """Where the engine tied what the checkpoint holds twice, changing one of them is refused by its code."""
    alone = rig.row("llama re-tied")["alone"]
    assert sorted(alone) == ["lm_head.weight", "model.embed_tokens.weight"]
    assert all("tied_tensor" in reason for reason in alone.values())


@pytest.mark.long
def test_s1_uneven_experts_are_refused_by_vllm_itself(tmp_path: Path) -> None:
    """Experts 48 wide on each of two ranks: the CPU engine has no kernel, and `graft probe` says so."""
    folder = make_family("gpt-oss", tmp_path / "model", intermediate_size=96)
    command = [str(Path(sys.executable).parent / "graft"), "probe", str(folder), "--"]
    options = ["--enforce-eager", "--max-model-len", "256", "--tensor-parallel-size", "2"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "No Unquantized MoE backend supports the deployment configuration" in done.stderr
