"""Reinforcement learning on a live vLLM server: sample, reward, learn, push. No process group, no collective.

python examples/rl_loop.py MODEL [--url http://127.0.0.1:8001] [--vllm http://127.0.0.1:8000] [--rounds 2]

The engine and the learner share nothing but two addresses: samples come over vLLM's own API, weights go over
Graft's as patches, and the next samples are of the new version. The reward is a toy: short words are good.
"""

import argparse
from dataclasses import dataclass

import httpx
import torch
from learner import Teacher, load_learner, told
from transformers import PreTrainedModel

from app.client import Client

PROMPTS = ("Once upon a time", "My advice to you is")


@dataclass(frozen=True)
class Sample:
    """A completion that the engine made up."""

    prompt: list[int]
    tokens: list[int]
    text: str

    @property
    def reward(self) -> float:
        """1 for words of no length, less for longer ones."""
        words = self.text.split()
        return 1 - sum(len(word) for word in words) / (10 * max(len(words), 1))


def sample(vllm: httpx.Client, model: str, prompt: str, number: int, tokens: int) -> list[Sample]:
    """So many completions of one prompt, with the tokens as the engine drew them."""
    request = {
        "model": model,
        "prompt": prompt,
        "n": number,
        "max_tokens": tokens,
        "temperature": 1.0,
        "return_token_ids": True,
    }
    answer = vllm.post("/v1/completions", json=request).raise_for_status().json()
    return [Sample(one["prompt_token_ids"], one["token_ids"], one["text"]) for one in answer["choices"]]


def loss_of(model: PreTrainedModel, group: list[Sample]) -> torch.Tensor:
    """REINFORCE with the mean reward of the group as its baseline."""
    rewards = torch.tensor([one.reward for one in group])
    total = torch.zeros(())
    for one, advantage in zip(group, rewards - rewards.mean(), strict=True):
        ids = torch.tensor([one.prompt + one.tokens], device=model.device)
        logits = model(ids).logits[0, len(one.prompt) - 1 : -1].float()
        drawn = logits.log_softmax(-1).gather(1, torch.tensor(one.tokens, device=model.device)[:, None])
        total = total - advantage * drawn.mean().cpu()
    return total / len(group)


def main() -> None:
    """Read the command line and learn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--url", default="http://127.0.0.1:8001")
    parser.add_argument("--vllm", default="http://127.0.0.1:8000")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--layers", type=int, default=1)
    given = parser.parse_args()
    model = load_learner(given.model, given.layers)
    learning = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(learning, lr=0.1)
    with Client(given.url) as graft, httpx.Client(base_url=given.vllm, timeout=300) as vllm:
        teacher = Teacher(graft, model)
        for number in range(1, given.rounds + 1):
            groups = [sample(vllm, given.model, prompt, given.samples, given.tokens) for prompt in PROMPTS]
            optimiser.zero_grad()
            for group in groups:
                loss_of(model, group).backward()
            optimiser.step()
            mean = sum(one.reward for group in groups for one in group) / (len(groups) * given.samples)
            print(f"round {number}, reward {mean:.3f}; {told(teacher.push(f'round {number}'))}")


if __name__ == "__main__":
    main()
