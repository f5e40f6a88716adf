"""The lines printed when the service is ready work as they stand."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.ops.served import Serve, Served

FAKE = """
import argparse, os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
import uvicorn
from tests.fakes.engine import FakeEngine

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
port = parser.parse_known_args()[0].port
engine = FakeEngine(secret=Path(os.environ["GRAFT_ENGINE_SECRET_FILE"]).read_text())


@engine.app.post("/v1/{route}")
async def answer() -> dict[str, int]:
    return {{"answer": sum(int(bits.sum()) for bits in engine.ranks[0].weights.values())}}


uvicorn.run(engine.app, host="127.0.0.1", port=port, log_level="warning")
"""
ROOT = str(Path(__file__).parents[2])


def _run(line: str, **environ: str) -> dict[str, object]:
    """Run one printed line in a shell, as a person would in another terminal, and parse the answer."""
    ran = subprocess.run(["bash", "-c", line], env=os.environ | environ, capture_output=True, check=True)
    answer: dict[str, object] = json.loads(ran.stdout)
    return answer


def _curl_lines(served: Served) -> list[str]:
    served.wait_for("the first answer, to the letter\ncurl .*\n")
    return [line for line in served.said.splitlines() if line.startswith("curl ")]


@pytest.mark.parametrize("token", ["", "se cret"])
def test_the_printed_tour_works(serve: Serve, free_port: int, token: str) -> None:
    """Ask, upload, ask again, roll back, ask again: another answer, then the first."""
    environ = {"GRAFT_TOKEN": token} if token else {}
    code = FAKE.format(root=ROOT, route="completions")
    served = serve(code, "m", "--engine-port", str(free_port), **environ)
    ask, upload, ask_again, roll_back, ask_at_last = _curl_lines(served)
    first = _run(ask)
    assert _run(upload, **environ)["version"] == "1"
    assert _run(ask_again) != first
    assert _run(roll_back, **environ)["restores"] == "0"
    assert _run(ask_at_last) == first
    assert not token or token not in served.said


def test_chat_models_are_asked_in_chat(serve: Serve, free_port: int, tmp_path: Path) -> None:
    """A folder with a chat template is asked through the chat route, also if its name needs quoting."""
    model = tmp_path / "it's a model"
    model.mkdir()
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "…"}))
    served = serve(
        FAKE.format(root=ROOT, route="chat/completions"), str(model), "--engine-port", str(free_port)
    )
    assert "answer" in _run(_curl_lines(served)[0])
