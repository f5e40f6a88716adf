"""Proofs kept on disk: what was learned of a kind of module, for the next start of an engine like this one.

The name of a file is a digest of all that the proof depends on: versions of vLLM and
torch, Graft's own code, CPU and GPU, variables that kernels are chosen by, the model's
dtype and quantisation, and the signature of the module. Whatever changes, another
file is looked for, so that nothing here is ever stale; a damaged one is learned anew.
"""

import json
import logging
import os
import platform
import tempfile
from pathlib import Path

import torch
from blake3 import blake3
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from vllm.config import VllmConfig

from loaders.engine.checkpoint import CHECKPOINT_DTYPE, TORCH_DTYPE
from loaders.engine.installed import vllm_version
from loaders.engine.kind import Kind, ParameterKind
from loaders.engine.spot import Spot
from schemas.dtypes import Dtype
from schemas.model import Treatment

_log = logging.getLogger(__name__)

VARIABLE = "GRAFT_CACHE_DIR"
_CHOOSERS = ("VLLM_", "ONEDNN_", "DNNL_", "MKL_", "CUDA_", "TORCH")
"""Beginnings of the names of variables by which kernels may be chosen."""
_OTHERS = ("VLLM_DIST_IDENT", "VLLM_OBJECT_STORAGE", "VLLM_RPC", "VLLM_PORT", "VLLM_HOST", "VLLM_LOGGING")
"""Of these, names that vLLM fills anew at every start, or that say where it is and how it talks."""


class _Spot(BaseModel):
    model_config = ConfigDict(frozen=True)

    path: str
    src_block: int
    dst_block: int
    table: str | None


class _Parameter(BaseModel):
    treatment: Treatment
    reason: str | None
    spots: tuple[_Spot, ...]


class _Kind(BaseModel):
    parameters: dict[str, _Parameter]
    handles: tuple[str, ...]
    tensors: dict[str, Dtype]
    sharing: tuple[tuple[str, ...], ...]
    derived: tuple[str, ...]


class Proofs:
    """The proofs of one kind of engine, in a folder that others may share."""

    def __init__(self, folder: Path, engine: str) -> None:
        self._folder = folder
        self._engine = engine

    @staticmethod
    def of(config: VllmConfig) -> "Proofs":
        """Where `GRAFT_CACHE_DIR` says, by default in the user's cache folder."""
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = os.environ.get(VARIABLE) or Path(base) / "graft"
        return Proofs(Path(folder) / "proofs", engine_key(config))

    def find(self, signature: object) -> Kind | None:
        """What was learned before, if it was."""
        try:
            with safe_open(self._path(signature), "pt") as file:
                kind = _Kind.model_validate_json(file.metadata()["kind"])
                tables = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            return _unpacked(kind, tables)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            _log.warning("a kept proof cannot be read and is made anew: %s", error)
            return None

    def keep(self, signature: object, kind: Kind) -> None:
        """Keep it for later starts; without room or permission it is only learned again."""
        path = self._path(signature)
        try:
            packed, tables = _packed(kind)
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, draft = tempfile.mkstemp(dir=self._folder)
            os.close(handle)
            save_file(tables, draft, metadata={"kind": packed.model_dump_json()})
            Path(draft).replace(path)
        except (OSError, SafetensorError, KeyError) as error:  # KeyError: a dtype that safetensors lacks
            _log.warning("a proof is not kept: %r", error)

    def _path(self, signature: object) -> Path:
        key = f"{self._engine}\n{signature!r}"
        return self._folder / f"{blake3(key.encode()).hexdigest()}.safetensors"


def engine_key(config: VllmConfig) -> str:
    """All that a proof depends on beside the module itself."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_CHOOSERS) and not name.startswith(_OTHERS)
    }
    parts = {
        "vllm": vllm_version(),
        "torch": torch.__version__,
        "graft": _own_code(),
        "machine": [platform.machine(), _cpu(), torch.backends.cpu.get_cpu_capability(), *_gpus()],
        "variables": variables,
        "dtype": str(config.model_config.dtype),
        "quantisation": repr(getattr(config.model_config.hf_config, "quantization_config", None)),
        "kernels": repr(config.kernel_config),
    }
    return json.dumps(parts, sort_keys=True)


def _own_code() -> str:
    hasher = blake3()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


def _cpu() -> list[str]:
    """What the first core calls itself and can do; the others of a machine are alike."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return [platform.processor()]
    wanted = ("model name", "flags", "Features", "CPU part")
    return sorted(line for line in first.splitlines() if line.startswith(wanted))


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())]


def _packed(kind: Kind) -> tuple[_Kind, dict[str, torch.Tensor]]:
    tables: dict[str, torch.Tensor] = {}

    def spot(found: Spot) -> _Spot:
        name = None
        if found.table is not None:
            name = f"table{len(tables)}"
            tables[name] = found.table.contiguous()
        return _Spot(path=found.path, src_block=found.src_block, dst_block=found.dst_block, table=name)

    parameters = {
        name: _Parameter(
            treatment=found.treatment, reason=found.reason, spots=tuple(spot(one) for one in found.spots)
        )
        for name, found in kind.parameters.items()
    }
    packed = _Kind(
        parameters=parameters,
        handles=kind.handles,
        tensors={path: CHECKPOINT_DTYPE[dtype] for path, dtype in kind.tensors.items()},
        sharing=tuple(sorted(kind.sharing)),
        derived=kind.derived,
    )
    return packed, tables


def _unpacked(kind: _Kind, tables: dict[str, torch.Tensor]) -> Kind:
    def spot(found: _Spot) -> Spot:
        table = None if found.table is None else tables[found.table]
        return Spot(found.path, found.src_block, found.dst_block, table)

    return Kind(
        {
            name: ParameterKind(found.treatment, tuple(spot(one) for one in found.spots), found.reason)
            for name, found in kind.parameters.items()
        },
        kind.handles,
        {path: TORCH_DTYPE[dtype] for path, dtype in kind.tensors.items()},
        frozenset(kind.sharing),
        kind.derived,
    )
