"""What tests ask a stack for, and what they compare of it."""

import torch
from safetensors.torch import load

from tests.e2e.stack import Answer, Stack
from tests.e2e.weights import same_bits

PROMPTS = ([10, 20, 30, 40, 50], [7, 3, 9, 200, 41] * 30)


def answers(stack: Stack) -> list[Answer]:
    return [stack.complete(prompt) for prompt in PROMPTS]


def seen(stack: Stack) -> tuple[list[Answer], dict[str, str]]:
    """All that identity and rollback must bring back."""
    return answers(stack), stack.digests()


def read_tensor(stack: Stack, name: str) -> torch.Tensor:
    return load(stack.call("GET", f"/v1/tensors/{name}").content)[name]


def read_expert(stack: Stack, layer: int, expert: int) -> dict[str, torch.Tensor]:
    return load(stack.call("GET", f"/v1/experts/{layer}/{expert}").content)


def same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return got.keys() == wanted.keys() and all(same_bits(got[name], wanted[name]) for name in wanted)
