"""The base checkpoint on disk: which tensors it has, and their bytes by mapping the files."""

import json
import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from schemas.dtypes import Dtype

if TYPE_CHECKING:  # importing vllm takes seconds, and reading headers does not need it
    from vllm.config import ModelConfig

TORCH_DTYPE: dict[Dtype, torch.dtype] = {
    Dtype.BOOL: torch.bool,
    Dtype.U8: torch.uint8,
    Dtype.I8: torch.int8,
    Dtype.F8_E4M3: torch.float8_e4m3fn,
    Dtype.F8_E5M2: torch.float8_e5m2,
    Dtype.F8_E8M0: torch.float8_e8m0fnu,
    Dtype.U16: torch.uint16,
    Dtype.I16: torch.int16,
    Dtype.F16: torch.float16,
    Dtype.BF16: torch.bfloat16,
    Dtype.U32: torch.uint32,
    Dtype.I32: torch.int32,
    Dtype.F32: torch.float32,
    Dtype.U64: torch.uint64,
    Dtype.I64: torch.int64,
    Dtype.F64: torch.float64,
}
"""The torch dtype of every safetensors dtype."""
CHECKPOINT_DTYPE = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPE.items()}


class MappedFile:
    """A file mapped copy-on-write: tensors read from it are views, and writing one never reaches the file."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as handle:
            self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        self.nbytes = len(self._map)

    def tensor(self, offset: int, nbytes: int, dtype: Dtype) -> torch.Tensor:
        """Flat tensor over `nbytes` bytes at `offset`; no bytes are read yet.

        Raises ValueError if the bytes are not in the file.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset}..{offset + nbytes} are not in a file of {self.nbytes}")
        torch_dtype = TORCH_DTYPE[dtype]
        if nbytes == 0:
            return torch.empty(0, dtype=torch_dtype)
        if offset % dtype.nbytes == 0:
            count = nbytes // dtype.nbytes
            return torch.frombuffer(self._map, dtype=torch_dtype, count=count, offset=offset)
        # safetensors does not promise alignment; torch needs it.
        return torch.frombuffer(bytearray(self._map[offset : offset + nbytes]), dtype=torch_dtype)


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """A tensor of the base checkpoint: where its bytes are."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    path: Path
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.dtype.nbytes


class Checkpoint:
    """A checkpoint folder of safetensors files, plain or sharded with an index."""

    def __init__(self, tensors: dict[str, BaseTensor]) -> None:
        self.tensors = tensors
        self._files: dict[Path, MappedFile] = {}

    @staticmethod
    def open(folder: Path) -> "Checkpoint":
        """Read the headers of a checkpoint folder.

        Raises FileNotFoundError if there are no safetensors files in it, and
        ValueError if the engine's loader would not read them as they stand.
        """
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [folder / name for name in names]
        else:
            files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
        if not files:
            raise FileNotFoundError(f"no safetensors files in {folder}")
        tensors: dict[str, BaseTensor] = {}
        for path in files:
            for tensor in _read_header(path):
                if tensor.name in tensors:
                    raise ValueError(f"{tensor.name} is in two files of {folder}")
                tensors[tensor.name] = tensor
        return Checkpoint(tensors)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, flat, as a private view of the mapped file."""
        tensor = self.tensors[name]
        if tensor.path not in self._files:
            self._files[tensor.path] = MappedFile(tensor.path)
        return self._files[tensor.path].tensor(tensor.offset, tensor.nbytes, tensor.dtype)


def _read_header(path: Path) -> list[BaseTensor]:
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(length))
    header.pop("__metadata__", None)
    return [
        BaseTensor(
            name=name,
            dtype=Dtype(entry["dtype"]),
            shape=tuple(entry["shape"]),
            path=path,
            offset=8 + length + entry["data_offsets"][0],
        )
        for name, entry in header.items()
    ]


def local_folder(model: "ModelConfig") -> Path:
    """The folder that the engine loaded the model from; a hub name is looked up in the local cache.

    Raises FileNotFoundError if it is in neither place.
    """
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(f"{model.model} is neither a folder nor in the local cache") from error
