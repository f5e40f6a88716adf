"""The README's commands, run as they stand against a running service."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.e2e.stack import Stack

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"^```(bash|python) readme\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STRICT = 'set -euo pipefail\ncurl() { command curl --fail-with-body "$@"; }\n'
"""What a reader would notice by eye: a command that failed, an answer that is a refusal."""
MARK = "-- next block --"


def _blocks(language: str, stack: Stack) -> list[str]:
    """The tagged blocks, with this stack's addresses and folders in place of the README's."""
    places = {
        "http://127.0.0.1:8001": stack.admin,
        "http://127.0.0.1:8000": stack.inference,
        ".graft/demo-model": str(stack.model),
        ".graft/": f"{stack.folder / 'state'}/",
    }
    blocks = [code for kind, code in BLOCK.findall(README.read_text()) if kind == language]
    for place, here in places.items():
        blocks = [block.replace(place, here) for block in blocks]
    return blocks


def _run(*command: str, stdin: str) -> str:
    """Output of a command that has to succeed."""
    ran = subprocess.run(command, input=stdin, env=os.environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def _wait_for(path: Path) -> None:
    for _ in range(300):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} was not written")


def _answer(output: str) -> str:
    """The text of the completion that a block printed last."""
    documents, decoder, rest = [], json.JSONDecoder(), output.strip()
    while rest:
        document, end = decoder.raw_decode(rest)
        documents.append(document)
        rest = rest[end:].lstrip()
    text: str = documents[-1]["choices"][0]["message"]["content"]
    return text


def test_the_curl_blocks_tell_the_story_they_promise(demo_stack: Stack) -> None:
    """In one shell, in order: an answer, another one after the upload, the first one after rolling back."""
    _wait_for(demo_stack.folder / "state" / "examples" / "expert.safetensors")
    demo_stack.rollback(0)
    blocks = _blocks("bash", demo_stack)
    script = STRICT + f"\necho '{MARK}'\n".join(blocks)
    before, changed, after = (_answer(output) for output in _run("bash", stdin=script).split(MARK))
    assert "Paris" in before
    assert changed != before
    assert after == before


def test_the_python_blocks_run(demo_stack: Stack) -> None:
    """Each block is a program of its own that ends without an error and leaves the version it says."""
    demo_stack.rollback(0)
    blocks = _blocks("python", demo_stack)
    assert len(blocks) == 3
    client, first, second = (_run(sys.executable, "-", stdin=block) for block in blocks)
    assert re.fullmatch(r"4 tensors are now version \d+\n", client)
    assert re.fullmatch(r"version \d+ pause [\d.]+ ms\n", first)
    assert re.fullmatch(r"6 tensors of 2 experts are now version \d+\n", second)
    demo_stack.rollback(0)
