"""docker-compose.yml as Debian's docker-compose understands it. No Docker engine is needed."""

import os
import subprocess
from typing import Any

import yaml

from tests.ops.tools import ROOT, tool

_OURS = ("GRAFT_", "MODEL", "VLLM_", "TENSOR_")


def config(**environ: str) -> subprocess.CompletedProcess[str]:
    """What `docker-compose config` says of all profiles, with these variables of ours and no others."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    command = [tool("docker-compose"), "--profile", "cpu", "--profile", "gpu", "config"]
    return subprocess.run(command, cwd=ROOT, env=env | environ, capture_output=True, text=True, check=False)


def composed(**environ: str) -> dict[str, Any]:
    """The whole file after interpolation and merging."""
    ended = config(**environ)
    assert ended.returncode == 0, ended.stderr
    parsed: dict[str, Any] = yaml.safe_load(ended.stdout)
    return parsed


def seconds(text: str) -> int:
    """A duration such as `1m30s`."""
    minutes, _, rest = text.removesuffix("s").rpartition("m")
    return 60 * int(minutes or 0) + int(rest or 0)
