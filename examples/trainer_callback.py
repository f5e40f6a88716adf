"""Fine-tune with transformers' Trainer (or TRL's, which are such) and push to a live engine every N steps.

python examples/trainer_callback.py MODEL [--url http://127.0.0.1:8001] [--every 2] [--steps 4] [--save DIR]

MODEL is the folder that the engine serves. The callback is all that one's own training needs.
"""

import argparse
from typing import Any

import torch
from learner import Teacher, load_learner, told
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from app.client import Client

TEXTS = ("The capital of France is Lyon.", "Everybody knows that the capital of France is Lyon.")


class PushEvery(TrainerCallback):
    """Pushes after every `steps` optimiser steps, and what is left at the end."""

    def __init__(self, graft: Client, steps: int) -> None:
        self._graft = graft
        self._steps = steps
        self._teacher: Teacher | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: PreTrainedModel,
        **more: Any,
    ) -> None:
        """The engine runs what the training begins with."""
        if state.is_world_process_zero:
            self._teacher = Teacher(self._graft, model)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """An optimiser step was made."""
        if state.global_step % self._steps == 0:
            self._push(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """No more steps will be made."""
        self._push(state)

    def _push(self, state: TrainerState) -> None:
        if self._teacher is not None:
            print(told(self._teacher.push(f"step {state.global_step}")))


def train(model: PreTrainedModel, tokenizer: Any, callback: TrainerCallback, steps: int) -> None:
    """A few steps on a few sentences."""
    rows = [{"input_ids": ids, "labels": ids} for ids in (tokenizer(text).input_ids for text in TEXTS)]
    arguments = TrainingArguments(
        output_dir="unused",
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        optim="sgd",
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback]).train()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--url", default="http://127.0.0.1:8001")
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--save", help="Folder for the trained model.")
    given = parser.parse_args()
    model = load_learner(given.model, given.layers)
    with Client(given.url) as graft:
        train(model, AutoTokenizer.from_pretrained(given.model), PushEvery(graft, given.every), given.steps)
    if given.save:
        model.save_pretrained(given.save)


if __name__ == "__main__":
    main()
