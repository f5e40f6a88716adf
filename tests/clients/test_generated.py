"""Clients generated from the running service's document: made, type-checked, and used over a socket."""

import asyncio
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from blake3 import blake3

from schemas.dtypes import Dtype
from tests.app.sockets import served
from tests.clients.tools import HERE, MODULES, PYTHON, ROOT, environment
from tests.fakes.admin import Q_PROJ, Admin, expert_parts, running
from tests.fakes.engine import HIDDEN
from tests.fakes.safetensors import Part, body, parse

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

COMMANDS = re.compile(r"^```bash clients\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOWN = "model.layers.0.mlp.experts.down_proj"
EVERY_BYTE = bytes(range(256)) * 2


def expert() -> dict[str, Part]:
    """An expert whose weights are all 256 byte values."""
    parts, start = {}, 0
    for name, (dtype, shape, bits) in expert_parts(1).items():
        parts[name] = (dtype, shape, EVERY_BYTE[start : start + len(bits)])
        start += len(bits)
    assert start >= 256
    return parts


def patches() -> bytes:
    """Two patches: one tensor whole, two elements of another."""
    whole = {"name": Q_PROJ, "shape": [HIDDEN, HIDDEN], "dtype": "BF16", "values": "whole"}
    some = {"name": "model.norm.weight", "shape": [HIDDEN], "dtype": "BF16", "values": "v", "indices": "i"}
    parts: dict[str, Part] = {
        "whole": (Dtype.BF16, (HIDDEN, HIDDEN), EVERY_BYTE[128:256]),
        "v": (Dtype.BF16, (2,), EVERY_BYTE[10:14]),
        "i": (Dtype.I32, (2,), (5).to_bytes(4, "little") + (1).to_bytes(4, "little")),
    }
    return body(parts, {"patches": json.dumps([whole, some])})


async def run(folder: Path, *command: str) -> None:
    """A command that has to succeed, in `folder`, while the service goes on answering."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


async def generate(folder: Path, generator: str, url: str) -> None:
    """Run those of the README's commands that are for `generator`; its warnings are failures."""
    (block,) = COMMANDS.findall((ROOT / "README.md").read_text())
    lines = [line for line in block.splitlines() if generator in line]
    assert lines
    strict = "--fail-on-warning" if generator == "openapi-python-client" else ""
    script = "\n".join(lines).replace("http://127.0.0.1:8001", url)
    await run(folder, "bash", "-euc", f"{script} {strict}")


async def used(admin: Admin, folder: Path, *command: str) -> None:
    """Let a client do its transaction; what engine and history then show, and what it read, is right."""
    down = admin.engine.weights(DOWN.replace(".0.", ".1.")).copy()
    files = {
        "expert": body(expert()),
        "patches": patches(),
        "broken": body({Q_PROJ: (Dtype.BF16, (1,), b"ab")}),
    }
    for name, content in files.items():
        (folder / f"{name}.safetensors").write_bytes(content)
    await run(folder, *command, str(folder))
    (transaction,) = admin.service.transactions.all()
    assert transaction.view().receipt is not None
    digests = [upload.blake3 for upload in transaction.view().uploads]
    assert digests == [blake3(files[name]).hexdigest() for name in ("expert", "patches")]
    assert parse((folder / "committed").read_bytes()) == expert()
    assert parse((folder / "after").read_bytes()) == parse((folder / "before").read_bytes()) != expert()
    assert (admin.engine.weights(DOWN.replace(".0.", ".1.")) == down).all()
    history = (await admin.http.get("/v1/versions")).json()["versions"]
    assert [entry["kind"] for entry in history] == ["base", "commit", "rollback"]


async def test_openapi_python_client(tmp_path: Path) -> None:
    """Generated without a warning, right under mypy --strict, every byte and error as it was sent."""
    shutil.copy(HERE / "with_python.py", tmp_path)
    async with running(tmp_path / "state") as admin, served(admin) as port:
        url = f"http://127.0.0.1:{port}"
        await generate(tmp_path, "openapi-python-client", url)
        rules = ("--config-file", str(HERE / "mypy.ini"), "--python-executable", str(PYTHON))
        await run(tmp_path, sys.executable, "-m", "mypy", *rules, "with_python.py", "graft_client")
        await used(admin, tmp_path, str(PYTHON), "with_python.py", url)


@pytest.mark.parametrize(
    ("generator", "script"), [("openapi-typescript", "with_fetch"), ("orval", "with_orval")]
)
async def test_typescript(tmp_path: Path, generator: str, script: str) -> None:
    """Generated, right under TypeScript's strict rules, every byte and error as it was sent."""
    for name in (f"{script}.ts", "tsconfig.json"):
        shutil.copy(HERE / name, tmp_path)
    (tmp_path / "node_modules").symlink_to(MODULES)
    async with running(tmp_path / "state") as admin, served(admin) as port:
        url = f"http://127.0.0.1:{port}"
        await generate(tmp_path, generator, url)
        await run(tmp_path, "tsc")
        await used(admin, tmp_path, "node", f"out/{script}.js", url)
