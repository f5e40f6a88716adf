"""What the examples share: a model that learns, and sending what it has learnt."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from app.client import Client, changes
from schemas.transactions import Receipt


def load_learner(model: str, layers: int) -> PreTrainedModel:
    """A checkpoint's model in float32, of which only the last `layers` layers learn."""
    learner: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    learner.requires_grad_(False)
    for layer in learner.model.layers[-layers:]:
        layer.requires_grad_(True)
    return learner


def checkpoint_state(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A copy of all that learns, under the names and in the shapes of the checkpoint, on the CPU.

    `dtype` is the checkpoint's; here all of its tensors have the same.

    transformers may hold tensors otherwise than the checkpoint does; for Mixtral it stacks the experts.
    """
    learning = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    named = revert_weight_conversion(model, learning)
    return {name: tensor.to("cpu", dtype, copy=True) for name, tensor in named.items()}


class Teacher:
    """Brings what a model has learnt to the engine, as patches: sparse where few elements have changed.

    The engine has to run what the model was loaded from. If somebody else changes it meanwhile, pushing
    raises `Conflict` instead of building on weights that are not ours.
    """

    def __init__(self, graft: Client, model: PreTrainedModel) -> None:
        self._graft = graft
        self._model = model
        self._dtype: torch.dtype = getattr(torch, graft.model().dtype)
        self._sent = checkpoint_state(model, self._dtype)
        self.version = graft.current().version

    def push(self, label: str) -> Receipt | None:
        """Send what has changed since the last time, as one version; none if nothing has."""
        now = checkpoint_state(self._model, self._dtype)
        patches = list(changes(self._sent, now))
        if not patches:
            return None
        receipt = self._graft.patch(patches, base_version=self.version, label=label)
        self._sent, self.version = now, receipt.version
        return receipt


def told(receipt: Receipt | None) -> str:
    """A line about a push."""
    if receipt is None:
        return "nothing has changed"
    sent = f"{receipt.tensors} tensors in {receipt.nbytes.uploaded} bytes"
    return f"version {receipt.version}: {sent}, {receipt.label}"
