"""The generators and their environment, as `make clients` installs them."""

import os
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODULES = HERE / "node_modules"
PYTHON = ROOT / ".venv-clients" / "bin" / "python"


def environment() -> dict[str, str]:
    """Variables under which the generators are found, and talk to nobody about their use."""
    assert PYTHON.exists() and MODULES.exists(), "the generators are not installed; run: make clients"
    path = os.pathsep.join((str(PYTHON.parent), str(MODULES / ".bin"), os.environ["PATH"]))
    quiet = {"REDOCLY_TELEMETRY": "off", "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true", "NO_COLOR": "1"}
    return {**os.environ, **quiet, "PATH": path, "npm_config_update_notifier": "false"}
