"""`make serve`, as the README and the tutorial give it to newcomers."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_make_serve_makes_the_demo_and_serves_it(tmp_path: Path) -> None:
    """The tutorial's first command, with a `graft` that only notes its calls: demo model, then serve."""
    (tmp_path / "graft").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    (tmp_path / "graft").chmod(0o755)
    (tmp_path / "stamp").write_text("as it should be")
    block = FENCE.findall((ROOT / "docs" / "tutorial.md").read_text())[0]
    command = f"{block.strip()} BIN={tmp_path} STAMP={tmp_path}/stamp KEY='as it should be'"
    made = subprocess.run(
        ["bash", "-euc", command],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert (tmp_path / "calls").read_text().splitlines() == [
        "demo-model .graft/demo-model",
        "serve .graft/demo-model -- --enforce-eager",
    ]
