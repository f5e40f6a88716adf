"""Writes a Hugging Face model folder whole or not at all: config, tokenizer, weights."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedTokenizerBase


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder beside `path` that becomes `path` if the block ends without an exception.

    Raises FileExistsError when `path` is there already.
    """
    if path.exists():
        raise FileExistsError(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield draft
        draft.chmod(0o755)
        draft.rename(path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_model_folder(
    path: Path,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    tensors: dict[str, torch.Tensor],
) -> None:
    """Make the folder `path` with `tensors` under exactly these names, in one file."""
    with new_folder(path) as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        weights = folder / "model.safetensors"
        save_file(contiguous, weights, metadata={"format": "pt"})
        weights.chmod(0o644)  # safetensors makes it private; the engine may run as another user
