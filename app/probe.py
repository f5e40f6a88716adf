"""`graft probe`: what an engine would do with each tensor of a checkpoint, told without serving it."""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from rich.table import Table

from app.engine_log import errors
from app.supported import InstalledVllm
from schemas.bridge import EngineDescription
from schemas.model import CheckpointTensor

COMMAND = "loaders.engine.probe"
_LAST_LINES = 12
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class ProbeError(Exception):
    """The engine could not load the checkpoint; the text is what it said of that."""


def run_probe(
    model: str, vllm_args: Sequence[str], vllm: InstalledVllm, environ: Mapping[str, str]
) -> EngineDescription:
    """Load the model in an engine that serves nobody, and ask it.

    Raises ProbeError.
    """
    env = dict(environ)
    if vllm.cpu:
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # -P: folders named like Graft's modules in the user's working folder are not looked at.
    argv = [sys.executable, "-P", "-m", COMMAND, model, *vllm_args]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        found = errors(done.stderr) or done.stderr.splitlines()[-_LAST_LINES:]
        raise ProbeError("\n".join(found))
    return EngineDescription.model_validate_json(done.stdout)


def summary(tensors: Sequence[CheckpointTensor]) -> list[tuple[str, int, CheckpointTensor]]:
    """Tensors that are alike but for layer and expert, as one: pattern, how many, and the first of them."""
    rows: dict[tuple[object, ...], tuple[str, int, CheckpointTensor]] = {}
    for tensor in tensors:
        pattern = _NUMBER.sub("*", tensor.name)
        key = (
            pattern,
            tensor.treatment,
            tensor.dtype,
            tensor.runtime_dtype,
            _NUMBER.sub("*", tensor.reason or ""),
        )
        _, count, first = rows.get(key, (pattern, 0, tensor))
        rows[key] = (pattern, count + 1, first)
    return list(rows.values())


def table(described: EngineDescription) -> Table:
    """For a terminal: one row for tensors that are alike."""
    shown = Table(
        title=f"{described.model.architecture} on vLLM {described.vllm_version}", title_justify="left"
    )
    for column in ("tensor", "number", "dtype", "runs as", "treatment", "reason"):
        shown.add_column(column, overflow="fold")
    for pattern, count, first in summary(described.tensors):
        runs_as = first.runtime_dtype.value if first.runtime_dtype else ""
        shown.add_row(
            pattern,
            str(count),
            first.dtype.value,
            runs_as,
            first.treatment.value,
            first.reason or _tied(first),
        )
    return shown


def _tied(tensor: CheckpointTensor) -> str:
    return f"one with {tensor.tied_to}" if tensor.tied_to else ""
