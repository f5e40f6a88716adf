"""The tutorial's commands, run as they stand against a running service, and what they are said to show."""

import re
from pathlib import Path

from tests.e2e.blocks import ROOT, blocks, in_one_shell, placed
from tests.e2e.stack import Stack

TUTORIAL = ROOT / "docs" / "tutorial.md"


def test_every_block_is_run() -> None:
    """No command of the page escapes: all fences are bash, the first is run by tests/ops/test_make.py."""
    fences = re.findall(r"^```(\S.*)$", TUTORIAL.read_text(), re.MULTILINE)
    assert set(fences) == {"bash"}
    assert blocks(TUTORIAL, "bash")[0] == "make serve\n"
    assert len(blocks(TUTORIAL, "bash")) == len(fences)


def test_the_tutorial_shows_what_it_says(demo_stack: Stack, tmp_path: Path) -> None:
    """In one shell, in order: Paris, another answer, Paris and the same memory, two changes, a refusal."""
    demo_stack.json("POST", "/v1/reload", json={})  # version 0 may no longer be held after other tests
    begun = demo_stack.version()
    commands = [placed(block, demo_stack) for block in blocks(TUTORIAL, "bash")[1:]]
    looked, asked, named, broken, back, compared, both, refused, cleaned = in_one_shell(
        commands, folder=tmp_path, GRAFT_URL=demo_stack.admin
    )
    assert "w1.weight" in looked
    assert "Paris" in asked
    assert "healthy" in named
    assert asked.strip() not in broken
    assert back.endswith(asked)
    assert "all memory is as before" in compared
    assert f"4 tensors are now version {begun + 3}\n" in both
    assert "refused with status 4" in refused
    assert "no version was used up" in refused
    assert str(begun + 4) in cleaned
    assert list(tmp_path.iterdir()) == []
