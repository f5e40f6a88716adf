"""What should be true: every acknowledged version and the state of its weights, kept beside the service."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class State:
    """Weights, told by how they come about: which checkpoint was loaded, and which expert was put over it."""

    checkpoint: int = 0
    """0 is the one that the engine starts on."""
    expert: int = 0
    """0 is the checkpoint's own."""


class Model:
    """The history as a client knows it."""

    def __init__(self) -> None:
        self.versions = [State()]
        self.maybe: State | None = None
        """That of the version after the last one, while nobody knows whether it was made."""

    @property
    def current(self) -> int:
        """The last acknowledged version."""
        return len(self.versions) - 1

    def with_expert(self, number: int) -> State:
        """The current weights, with that expert over them."""
        return replace(self.versions[-1], expert=number)

    def acknowledge(self) -> None:
        """The change under way was made."""
        assert self.maybe is not None
        self.versions.append(self.maybe)
        self.maybe = None
