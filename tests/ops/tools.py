"""Programs that the tests of deploy/ run; `make tools` installs them from Debian."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def tool(name: str) -> str:
    """Path of a program; a test that needs it fails without it."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        pytest.fail(f"{name} is not installed: make tools")
    return found


def ran(*command: str | Path, stdin: str | None = None) -> str:
    """Output of a program that has to succeed."""
    name, *arguments = (str(part) for part in command)
    ended = subprocess.run(
        [tool(name), *arguments], input=stdin, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr
