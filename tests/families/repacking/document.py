"""Writes docs/repacking.md from the lists of functions. `python -m tests.families.repacking.document`."""

from collections.abc import Iterator
from pathlib import Path

from tests.families.repacking.cases import CASES
from tests.families.repacking.elsewhere import GPU, OTHER_CPUS, Elsewhere
from tests.families.repacking.functions import Case

DOCUMENT = Path(__file__).parents[3] / "docs" / "repacking.md"
_STAND_INS = {
    "marlin_repack": "the repacking operation, by vLLM's own torch reference",
    "cuda": "the GPU's memory, by the CPU's",
    "scaled_fp8_quant": "the fp8 quantiser, by one in torch",
    "one_rank": "the rank's number",
}
HEAD = """# How vLLM's rearrangements of weights are treated

After loading, vLLM pads, permutes, interleaves, packs and rescales weights for the kernel that it
has chosen. Graft learns what that does from vLLM's own code when the engine starts: *direct* is
written through the learned injection, *rebuilt* is made anew by the same code. What neither is
proved of is refused with the reason. Made by `python -m tests.families.repacking.document`.

## Tried here

These run on CPU tensors. Each is put behind a small layer, and Graft's session over it: own weights
change nothing; changed elements, experts and tensors equal the function run afresh; and all comes
back bit for bit, three times (`tests/families/repacking/test_repacking.py`). Where a function wants
one thing of a GPU that torch can do as well, the last column says what is replaced here; with the
real one it is proved at start on the GPU.

| function in vLLM 0.32 | of | treatment | replaced here |
|---|---|---|---|
"""
GPU_HEAD = """
## Proved at start on the GPU, not here

These need an operation or a library that there is for GPUs only. Graft treats them like all others:
what they do is learned and proved on random values before the engine serves, or the tensors are
`unsupported`. None of this page has been run on a GPU yet. On a machine with an NVIDIA GPU

```
make test-gpu
```

makes an environment with vLLM for CUDA (`make setup-gpu`), runs the functions above with nothing
replaced, and starts engines on toys in each quantisation: identity, changes against a fresh engine,
rollback. Without a GPU it fails and says so.

| function in vLLM 0.32 | of | needs |
|---|---|---|
"""
CPU_HEAD = """
## Proved at start on other CPUs, not here

| function in vLLM 0.32 | of | needs |
|---|---|---|
"""
_LIBRARIES = {"_missing": "DeepGEMM", "tl.": "Triton"}


def document() -> str:
    """The text of the page."""
    return "".join(
        [
            HEAD,
            *(_line(case) for case in CASES),
            GPU_HEAD,
            *_listed(GPU),
            CPU_HEAD,
            *_listed(OTHER_CPUS),
        ]
    )


def _line(case: Case) -> str:
    name = f"`{case.name}`{f', {case.variant}' if case.variant else ''}"
    stand_ins = "; ".join(_STAND_INS[one] for one in case.stand_ins)
    return f"| {name} | {case.rearranges} | {_treatment(case)} | {stand_ins} |\n"


def _treatment(case: Case) -> str:
    if isinstance(case.treatment, str):
        return case.treatment
    kinds = sorted(set(case.treatment.values()))
    if len(kinds) == 1:
        return kinds[0]
    return "; ".join(f"{kind}: {', '.join(_of(case.treatment, kind))}" for kind in kinds)


def _of(treatments: dict[str, str], kind: str) -> list[str]:
    return [f"`{name}`" for name, found in treatments.items() if found == kind]


def _listed(functions: tuple[Elsewhere, ...]) -> Iterator[str]:
    for one in functions:
        yield f"| `{one.name}` | {one.rearranges} | {_LIBRARIES.get(one.needs, f'`{one.needs}`')} |\n"


def main() -> None:
    """Write it."""
    DOCUMENT.write_text(document())


if __name__ == "__main__":
    main()
