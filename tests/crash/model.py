"""What should be true: every acknowledged version and its weights, kept beside the service."""

from collections.abc import Mapping

import numpy as np
from blake3 import blake3

from tests.fakes.admin import expert_parts
from tests.fakes.engine import Array, base_weights, tensors

Weights = dict[str, Array]


class Model:
    """The history as a client knows it."""

    def __init__(self) -> None:
        self.versions: list[Weights] = [base_weights()]
        self.maybe: Weights | None = None
        """Weights of the version after the last one, while nobody knows whether it was made."""

    @property
    def current(self) -> int:
        """The last acknowledged version."""
        return len(self.versions) - 1

    def with_expert(self, seed: int) -> Weights:
        """The current weights with expert 0 of layer 0 as uploaded under `seed`."""
        weights = {name: bits.copy() for name, bits in self.versions[-1].items()}
        shapes = {tensor.name: tensor.shape for tensor in tensors()}
        for short, (_, _, content) in expert_parts(seed).items():
            name = f"model.layers.0.mlp.experts.{short}"
            weights[name].reshape(shapes[name])[0].reshape(-1)[:] = np.frombuffer(content, np.uint16)
        return weights

    def acknowledge(self) -> None:
        """The change under way was made."""
        assert self.maybe is not None
        self.versions.append(self.maybe)
        self.maybe = None

    def digests(self) -> Mapping[str, str]:
        """Digests of the current weights, by tensor."""
        return {name: blake3(bits.tobytes()).hexdigest() for name, bits in self.versions[-1].items()}
