"""The lines printed when the service is ready work as they stand."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from app.demo import Tour
from app.guide import Guide
from app.settings import Settings
from tests.ops.served import Serve, fake_engine

ANSWER = """
@engine.app.post("/v1/completions")
async def answer() -> dict[str, int]:
    return {"answer": sum(int(bits.sum()) for bits in engine.ranks[0].weights.values())}
"""
"""A completion that depends on every weight."""


def _run(line: str) -> dict[str, object]:
    """Run one printed line in a shell, as a person would in another terminal, and parse the answer."""
    ran = subprocess.run(["bash", "-c", line], capture_output=True, check=True)
    answer: dict[str, object] = json.loads(ran.stdout)
    return answer


def test_the_printed_tour_works(serve: Serve, free_port: int) -> None:
    """Ask, upload, ask again, roll back, ask again: another answer, then the first."""
    served = serve(fake_engine(ANSWER), "m", "--engine-port", str(free_port))
    served.wait_for("the first answer, to the letter\ncurl .*\n")
    lines = [line for line in served.said.splitlines() if line.startswith("curl ")]
    ask, upload, ask_again, roll_back, ask_at_last = lines
    first = _run(ask)
    assert _run(upload)["version"] == "1"
    assert _run(ask_again) != first
    assert _run(roll_back)["restores"] == "0"
    assert _run(ask_at_last) == first


def _tour(**given: object) -> Tour:
    plain = {"model": "m", "chat": False, "version": "0", "token_source": None}
    return Tour(admin="http://a", inference="http://i", **(plain | given))  # type: ignore[arg-type]


@pytest.mark.parametrize(("chat", "route"), [(True, "/v1/chat/completions"), (False, "/v1/completions")])
def test_models_are_asked_in_their_way(chat: bool, route: str) -> None:
    """With a chat template the question is a message, else a prompt; any model name survives the shell."""
    words = shlex.split(_tour(chat=chat, model='it\'s "a" $model').ask())
    assert "http://i" + route in words
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == 'it\'s "a" $model'
    assert ("messages" in body) is chat
    assert body["temperature"] == 0


def test_tokens_are_named_and_never_shown() -> None:
    """Where a token is needed the lines take it from where it lies; questions to vLLM need none."""
    tour = _tour(token_source="$GRAFT_TOKEN")
    for line in (tour.upload(Path("/a b"), 1, 2), tour.roll_back()):
        shown = subprocess.run(
            ["bash", "-c", line.replace("curl", "printf '%s\\n'", 1)],
            env=os.environ | {"GRAFT_TOKEN": "se cret"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        assert "Authorization: Bearer se cret" in shown
        assert "cret" not in line
    assert "Authorization" not in tour.ask()


def test_the_guide_knows_where_the_token_lies(tmp_path: Path) -> None:
    """From a variable or a file: the shell text that yields it, never the token itself."""
    file = tmp_path / "my token"
    file.write_text("secret")
    by_file = Guide(FastAPI(), Settings(token_file=file), 8001)
    by_variable = Guide(FastAPI(), Settings(token=SecretStr("secret")), 8001)
    assert by_file.token_source() == f"$(cat '{file}')"
    assert by_variable.token_source() == "$GRAFT_TOKEN"
    assert Guide(FastAPI(), Settings(), 8001).token_source() is None
