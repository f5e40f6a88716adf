"""Ties: what the engine holds once must be left equal by a transaction."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loaders.engine.layout import Layout
from loaders.engine.move import Move, Scatter, bits_of
from loaders.engine.spot import identity
from loaders.engine.ties import live_ties, require_equal
from schemas.problems import Code, ProblemError
from tests.loaders.engine.atlases import Place

EMBEDDING, HEAD, FREE = "embed.weight", "head.weight", "norm.weight"


def atlas() -> Any:
    """Embedding and head in one memory, and a tensor that is alone in its own."""
    memory = torch.arange(4.0)
    targets = {EMBEDDING: memory, HEAD: memory, FREE: torch.zeros(4)}
    sites: Any = {name: Place(name, (4,), ((name, identity(name, 4)),)) for name in targets}
    for site in sites.values():
        site.source = site.name
    into = {name: (SimpleNamespace(tensor=f"model.{name}"),) for name in targets}
    return SimpleNamespace(sites=sites, targets=targets, ties=live_ties(sites, targets), into=into)


def whole(target: str, *values: float) -> Move:
    return Move(target, Layout.contiguous((4,)), bits_of(torch.tensor(values, dtype=torch.float32)))


def sparse(target: str, position: int, value: float) -> Move:
    return Move(
        target, Scatter(torch.tensor([position])), bits_of(torch.tensor([value], dtype=torch.float32))
    )


def test_ties_are_read_from_memory() -> None:
    """Sites in one memory are tied, whatever the checkpoint calls them; one alone is not."""
    assert atlas().ties == dict.fromkeys((EMBEDDING, HEAD), (EMBEDDING, HEAD))


EQUAL = {
    "nothing tied": [whole(FREE, 1, 2, 3, 4)],
    "both alike": [whole(EMBEDDING, 1, 2, 3, 4), whole(HEAD, 1, 2, 3, 4)],
    "alike in another way": [whole(EMBEDDING, 0, 9, 2, 3), sparse(HEAD, 1, 9)],
    "alike in the end": [sparse(HEAD, 1, 7), sparse(EMBEDDING, 1, 9), sparse(HEAD, 1, 9)],
    "what is there already": [sparse(HEAD, 2, 2)],
    "not a number": [sparse(HEAD, 0, float("nan")), sparse(EMBEDDING, 0, float("nan"))],
}
UNEQUAL = {
    "only one": [sparse(HEAD, 1, 9)],
    "one more element": [sparse(HEAD, 1, 9), sparse(HEAD, 2, 9), sparse(EMBEDDING, 1, 9)],
    "another value": [whole(EMBEDDING, 1, 2, 3, 4), whole(HEAD, 1, 2, 3, 5)],
    "another sign of zero": [sparse(HEAD, 0, -0.0), sparse(EMBEDDING, 0, 0.0)],
}


@pytest.mark.parametrize("case", EQUAL)
def test_what_leaves_them_equal_is_taken(case: str) -> None:
    """Bits decide, after all moves of each; the memory is not touched."""
    found = atlas()
    require_equal(found, {move.target for move in EQUAL[case]}, EQUAL[case])
    assert found.targets[EMBEDDING].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("case", UNEQUAL)
def test_what_would_leave_them_different_is_refused(case: str) -> None:
    """The refusal names both tensors as the checkpoint does."""
    with pytest.raises(ProblemError, match=r"model\.embed\.weight and model\.head\.weight") as refused:
        require_equal(atlas(), {move.target for move in UNEQUAL[case]}, UNEQUAL[case])
    assert refused.value.code is Code.TIED_TENSOR
