"""Change one expert of a live engine, ask canary questions, and go back if one is no longer answered.

python examples/expert_surgery.py LAYER EXPERT SCALE [--url …] [--vllm …] [--model …]

Scales all weights of an expert. With 1.01 the patient lives; an expert scaled by -50 is taken out again.
"""

import argparse
from dataclasses import dataclass

import httpx
from safetensors.torch import load

from app.client import Client


@dataclass(frozen=True)
class Canary:
    """A question, and a word that a healthy model's answer has."""

    question: str
    word: str


CANARIES = (
    Canary("What is the capital of France?", "Paris"),
    Canary("What colour is the sky on a clear day?", "blue"),
)


class Ward:
    """The engine's answers."""

    def __init__(self, vllm: httpx.Client, model: str) -> None:
        self._vllm = vllm
        self._model = model

    def ask(self, question: str) -> str:
        """The engine's one answer: it draws no lots."""
        request = {
            "model": self._model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 32,
            "temperature": 0,
        }
        answer = self._vllm.post("/v1/chat/completions", json=request).raise_for_status().json()
        text: str = answer["choices"][0]["message"]["content"]
        return text

    def dead(self) -> list[Canary]:
        """The canaries that do not sing any more."""
        return [one for one in CANARIES if one.word.lower() not in self.ask(one.question).lower()]


def operate(graft: Client, ward: Ward, layer: int, expert: int, scale: float) -> bool:
    """Whether the new expert stays. If it does not, or anything else goes wrong, all is as it was."""
    before = graft.current().version
    if ward.dead():
        raise SystemExit("the engine is not healthy to begin with")
    old = load(graft.read_expert(layer, expert).content)
    new = {name: (tensor.float() * scale).to(tensor.dtype) for name, tensor in old.items()}
    receipt = graft.put_expert(layer, expert, new, base_version=before, label=f"scaled by {scale}")
    try:
        dead = ward.dead()
    except BaseException:
        graft.rollback(before, if_match=receipt.version)
        raise
    if not dead:
        print(f"version {receipt.version} stays")
        return True
    back = graft.rollback(before, if_match=receipt.version)
    print(f"version {receipt.version} fails at {dead[0].question!r}: back to {before} as {back.version}")
    return False


def main() -> None:
    """Read the command line and operate; status 1 if the expert was taken out again."""
    parser = argparse.ArgumentParser()
    parser.add_argument("layer", type=int)
    parser.add_argument("expert", type=int)
    parser.add_argument("scale", type=float)
    parser.add_argument("--url", default="http://127.0.0.1:8001")
    parser.add_argument("--vllm", default="http://127.0.0.1:8000")
    given = parser.parse_args()
    with Client(given.url) as graft, httpx.Client(base_url=given.vllm, timeout=300) as vllm:
        ward = Ward(vllm, graft.model().model)
        raise SystemExit(not operate(graft, ward, given.layer, given.expert, given.scale))


if __name__ == "__main__":
    main()
