"""Runs rows in a process of their own, since importing vLLM takes longer than most of what is done to one."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.families.rows import Spec

Found = dict[str, Any]


def run_rows(rows: Mapping[str, Spec], folder: Path, **environ: str) -> dict[str, Found]:
    """What was found for every row; for one that could not be run, an `error`.

    Checkpoints, logs and what the engines write go below `folder`; `environ` is set for the process.
    """
    listed = folder / f"rows-{len(rows)}.json"
    listed.write_text(json.dumps([_made(name, spec, folder) for name, spec in rows.items()]))
    log = listed.with_suffix(".log")
    with log.open("w") as errors:
        done = subprocess.run(
            [sys.executable, "-m", "tests.families.rig", str(listed), str(folder)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=False,
            cwd=Path(__file__).parents[2],
            env=os.environ | environ,
        )
    found = {item["name"]: item for item in map(json.loads, done.stdout.splitlines())}
    return {name: found.get(name, {"error": log.read_text()[-3000:]}) for name in rows}


def _made(name: str, spec: Spec, folder: Path) -> dict[str, Any]:
    """The row's checkpoint, and what the process is told of it."""
    path = folder / name.replace(" ", "-").replace(",", "").replace("=", "")
    spec.make(path)
    return {"name": name, "folder": str(path), "options": spec.options, "generates": spec.generates}
