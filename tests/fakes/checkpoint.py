"""The fake engine's model as a checkpoint folder of two files with an index."""

import json
from collections.abc import Mapping
from pathlib import Path

from tests.fakes.engine import Array, base_weights, tensors
from tests.fakes.safetensors import Part, body

FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
OTHERS = {"config.json": b'{"model_type": "fake"}', "tokenizer.json": b"{}"}


def parts(weights: Mapping[str, Array]) -> dict[str, Part]:
    """All tensors of the fake model with these raw bits."""
    return {one.name: (one.dtype, one.shape, weights[one.name].tobytes()) for one in tensors()}


def write_checkpoint(folder: Path, found: Mapping[str, Part] | None = None) -> Path:
    """Write a folder with these tensors, else the base's; the first file has half of them."""
    found = parts(base_weights()) if found is None else found
    folder.mkdir(parents=True, exist_ok=True)
    half = len(found) // 2
    names = list(found)
    weight_map = {}
    for file, chosen in zip(FILES, (names[:half], names[half:]), strict=True):
        (folder / file).write_bytes(body({name: found[name] for name in chosen}, {"format": "pt"}))
        weight_map |= dict.fromkeys(chosen, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, content in OTHERS.items():
        (folder / name).write_bytes(content)
    return folder
