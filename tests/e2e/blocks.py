"""Commands of documents, run as they stand against a running service."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.stack import Stack

ROOT = Path(__file__).parents[2]
STRICT = 'set -euo pipefail\ncurl() { command curl --fail-with-body "$@"; }\n'
"""What a reader would notice by eye: a command that failed, an answer that is a refusal."""
MARK = "-- next block --"


def blocks(document: Path, kind: str) -> list[str]:
    """The blocks of a document that begin with "```kind"."""
    block = re.compile(rf"^```{kind}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return block.findall(document.read_text())


def placed(block: str, stack: Stack) -> str:
    """A block with this stack's addresses and folders in place of the document's."""
    places = {
        "http://127.0.0.1:8001": stack.admin,
        "http://127.0.0.1:8000": stack.inference,
        ".graft/demo-model": str(stack.model),
        ".graft/": f"{stack.folder / 'state'}/",
        ".venv/bin/": f"{Path(sys.executable).parent}/",
    }
    for place, here in places.items():
        block = block.replace(place, here)
    return block


def run(*command: str, stdin: str, folder: Path | None = None, **variables: str) -> str:
    """Output of a command that has to succeed."""
    ran = subprocess.run(
        command,
        input=stdin,
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def in_one_shell(blocks: list[str], folder: Path | None = None, **variables: str) -> list[str]:
    """What each block printed, run one after the other in one strict shell."""
    script = STRICT + f"\necho '{MARK}'\n".join(blocks)
    return run("bash", stdin=script, folder=folder, **variables).split(MARK)
