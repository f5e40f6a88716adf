"""The README's commands, run as they stand against a running service."""

import json
import re
import sys
import time
from pathlib import Path

from tests.e2e.blocks import ROOT, blocks, in_one_shell, placed, run
from tests.e2e.stack import Stack

README = ROOT / "README.md"


def _blocks(language: str, stack: Stack) -> list[str]:
    return [placed(block, stack) for block in blocks(README, f"{language} readme")]


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
    before, changed, after = (_answer(output) for output in in_one_shell(_blocks("bash", demo_stack)))
    assert "Paris" in before
    assert changed != before
    assert after == before


def test_the_python_blocks_run(demo_stack: Stack) -> None:
    """Each block is a program of its own that ends without an error and leaves the version it says."""
    demo_stack.rollback(0)
    programs = _blocks("python", demo_stack)
    assert len(programs) == 3
    client, first, second = (run(sys.executable, "-", stdin=block) for block in programs)
    assert re.fullmatch(r"4 tensors are now version \d+\n", client)
    assert re.fullmatch(r"version \d+ pause [\d.]+ ms\n", first)
    assert re.fullmatch(r"6 tensors of 2 experts are now version \d+\n", second)
    demo_stack.rollback(0)
