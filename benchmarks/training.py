"""A few optimiser steps on the demo model, on a CPU: what real changes of bf16 weights look like."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

_TEXT = Path(__file__).parents[1] / "docs" / "architecture.md"
_LENGTH, _BATCH = 128, 2
LEARNING_RATE = 1e-5
"""As when a language model is tuned further: most updates are smaller than half a step of bf16."""


def train(model: Path, folder: Path, steps: int) -> Iterator[Path]:
    """Checkpoint folders, one after each step of AdamW on this project's own text."""
    torch.manual_seed(0)
    tuned = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(model)
    batches = _batches(tokenizer(_TEXT.read_text(), return_tensors="pt")["input_ids"][0])
    optimiser = torch.optim.AdamW(tuned.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    tuned.train()
    for step in range(1, steps + 1):
        tokens = next(batches)
        loss = tuned(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        out = folder / f"step-{step}"
        tuned.save_pretrained(out)
        tokenizer.save_pretrained(out)
        yield out


def _batches(tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    size = _LENGTH * _BATCH
    for begin, end in pairwise(range(0, tokens.numel(), size)):
        yield tokens[begin:end].view(_BATCH, _LENGTH)
