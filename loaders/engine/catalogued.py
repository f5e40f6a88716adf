"""What ranks say of the model, and what they say together."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel

from loaders.engine.installed import vllm_version
from schemas.bridge import EngineDescription, ParallelLayout
from schemas.model import CheckpointTensor, ModelInfo, Treatment

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SEVERITY = {Treatment.DIRECT: 0, Treatment.REBUILT: 1, Treatment.UNSUPPORTED: 2}


class Catalogued(BaseModel):
    """One rank's view: its part of every checkpoint tensor."""

    model: ModelInfo
    parallel: ParallelLayout
    checkpoint: str
    """The folder that the rank loaded the model from."""
    tensors: tuple[CheckpointTensor, ...]


def catalogued(config: "VllmConfig", tensors: tuple[CheckpointTensor, ...], checkpoint: str) -> Catalogued:
    """Put a rank's catalogue beside what its configuration says."""
    model, parallel = config.model_config, config.parallel_config
    text = model.hf_text_config
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    return Catalogued(
        model=ModelInfo(
            model=str(model.model),
            architecture=model.architecture,
            dtype=str(model.dtype).removeprefix("torch."),
            quantization=model.quantization,
            layers=int(text.num_hidden_layers),
            experts=int(experts or getattr(text, "n_routed_experts", None) or 0),
        ),
        parallel=ParallelLayout(
            tensor=parallel.tensor_parallel_size,
            pipeline=parallel.pipeline_parallel_size,
            data=parallel.data_parallel_size,
            expert=parallel.enable_expert_parallel,
        ),
        checkpoint=checkpoint,
        tensors=tensors,
    )


def described(ranks: Sequence[Catalogued]) -> EngineDescription:
    """What the whole engine is and how it treats each tensor."""
    return EngineDescription(
        vllm_version=vllm_version(),
        torch_version=torch.__version__,
        parallel=ranks[0].parallel,
        model=ranks[0].model,
        tensors=together(ranks),
        checkpoint=ranks[0].checkpoint,
    )


def together(ranks: Sequence[Catalogued]) -> tuple[CheckpointTensor, ...]:
    """The catalogue of the whole engine: a tensor is as hard to update as on its hardest rank."""
    return tuple(_hardest(views) for views in zip(*(rank.tensors for rank in ranks), strict=True))


def _hardest(views: Iterable[CheckpointTensor]) -> CheckpointTensor:
    """Ranks that hold nothing of a tensor do not count, unless none does."""
    found = list(views)
    held = [view for view in found if view.loaded] or found
    return max(held, key=lambda view: _SEVERITY[view.treatment])
