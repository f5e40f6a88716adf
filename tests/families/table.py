"""Writes docs/treatments.md: what `graft probe` says of every row. `python -m tests.families.table`."""

import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.probe import run_probe
from app.supported import installed_vllm
from tests.families.rows import ROWS, Spec

DOCUMENT = Path(__file__).parents[2] / "docs" / "treatments.md"
DOCUMENTED = {name: spec for name, spec in ROWS.items() if not spec.reference}
KINDS = ("direct", "rebuilt", "unsupported")
HEAD = """# How every family is treated

One line for each model and layout that is tried in `tests/families`: how many checkpoint tensors are
written where the kernel reads them (*direct*), how many have derived state made anew (*rebuilt*), and
how many can't be updated. Each line is proved there by identity (whole, three times; expert by expert),
sparse and dense changes against a fresh engine, ten commits on one tensor, and rollback: by digests of
all runtime state and, where vLLM's CPU engine generates in that layout, by tokens and log-probabilities.
Online quantisation to fp8 is tried too, with a quantiser in plain torch, as the CPU build has none.

`graft probe MODEL -- VLLM-ARGS` prints the same for any checkpoint. Another CPU has other kernels, and
so may have another treatment. Made by `python -m tests.families.table` on a CPU with: {features}.

| model and layout | direct | rebuilt | unsupported | proved by |
|---|---|---|---|---|
"""
FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def features() -> str:
    """What vLLM's CPU kernels choose by; another CPU may have another treatment for the same module."""
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    return ", ".join(name for name in FEATURES if name in flags.split())


def line(name: str, counts: Mapping[str, int], spec: Spec) -> str:
    """The line of a row."""
    proof = "digests, tokens, logprobs" if spec.generates else "digests"
    numbers = " | ".join(str(counts.get(kind, 0)) for kind in KINDS)
    return f"| {name} | {numbers} | {proof} |"


def arguments(options: Mapping[str, Any]) -> list[str]:
    """A row's options as vLLM's command line has them."""
    given = {"max_model_len": 256, "max_num_seqs": 4, "enforce_eager": True, **options}
    flags = []
    for name, value in given.items():
        if value is not False:
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return flags


def main() -> None:
    """Probe every row."""
    lines = []
    environ = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "PYTHONPATH": str(DOCUMENT.parents[1])}
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, spec) in enumerate(DOCUMENTED.items()):
            folder = Path(scratch) / str(number)
            spec.make(folder)
            found = run_probe(str(folder), arguments(spec.options), installed_vllm(), environ)
            lines.append(line(name, Counter(tensor.treatment.value for tensor in found.tensors), spec))
            print(lines[-1], flush=True)
    DOCUMENT.write_text(HEAD.format(features=features()) + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
