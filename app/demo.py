"""What a newcomer can try: the demo model, an example upload, and curl lines that work as they stand."""

import json
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from schemas.model import ExpertTensor

MAKER = "loaders.engine.demo_model"
QUESTION = "What is the capital of France?"
EXPERT = (15, 0)
"""Layer and expert without which the demo model still speaks, but answers otherwise."""


class DemoModelError(Exception):
    """The demo model could not be made; the text is the end of its maker's output."""


def make_demo_model(path: Path) -> bool:
    """Make the demo model in the folder `path`; returns False if it was there already.

    torch is needed for it, so another process does the work. Raises DemoModelError.
    """
    if (path / "config.json").exists():
        return False
    made = subprocess.run(
        [sys.executable, "-P", "-m", MAKER, str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if made.returncode != 0:
        text = made.stdout.decode("utf-8", "replace").replace("\r", "\n")
        raise DemoModelError("\n".join(deque((line for line in text.splitlines() if line.strip()), 20)))
    return True


def write_zero_expert(path: Path, tensors: Sequence[ExpertTensor]) -> None:
    """Write an expert whose every weight is zero, as a safetensors file of the right shapes."""
    header: dict[str, object] = {}
    end = 0
    for tensor in tensors:
        begin, end = end, end + prod(tensor.shape) * tensor.dtype.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@dataclass(frozen=True)
class Tour:
    """The curl lines that show Graft at work on a running pair of services."""

    admin: str
    inference: str
    model: str
    chat: bool
    version: str
    token_source: str | None
    """Shell text that yields the bearer token, if one is needed."""

    def ask(self) -> str:
        """A question whose answer is the same as long as the weights are."""
        body: dict[str, object] = {"model": self.model, "temperature": 0, "max_tokens": 32}
        if self.chat:
            body["messages"] = [{"role": "user", "content": QUESTION}]
        else:
            body["prompt"] = QUESTION
        route = "chat/completions" if self.chat else "completions"
        return f"curl -s {self.inference}/v1/{route} {_JSON} -d {shlex.quote(json.dumps(body))}"

    def upload(self, file: Path, layer: int, expert: int) -> str:
        """Replace one expert by the one in `file`."""
        target = f"{self.admin}/v1/experts/{layer}/{expert}"
        return (
            f"curl -s{self._authorization()} -X PUT {target}"
            f" -H 'Content-Type: application/octet-stream' --data-binary {shlex.quote(f'@{file}')}"
        )

    def roll_back(self) -> str:
        """Put back the weights as they were when the tour began."""
        body = json.dumps({"to_version": self.version})
        return f"curl -s{self._authorization()} {self.admin}/v1/rollback {_JSON} -d {shlex.quote(body)}"

    def _authorization(self) -> str:
        return f' -H "Authorization: Bearer {self.token_source}"' if self.token_source else ""


_JSON = "-H 'Content-Type: application/json'"


def speaks_chat(model: str) -> bool:
    """Whether the model folder brings a chat template."""
    folder = Path(model)
    if (folder / "chat_template.jinja").exists():
        return True
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "chat_template" in config
