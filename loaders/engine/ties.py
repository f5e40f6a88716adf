"""Ties: parameters that the engine put into one memory although the checkpoint has a tensor for each.

vLLM ties an output head to the embedding when a checkpoint holds both and they are
equal (`maybe_retie_word_embeddings`). A fresh engine on a checkpoint in which they
differ would not, so a transaction has to leave them equal.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from loaders.engine.move import Move, bits_of
from schemas.problems import Code, ProblemError

if TYPE_CHECKING:
    from loaders.engine.atlas import Atlas, Site

Ties = dict[str, tuple[str, ...]]
"""Site → all sites in the same memory, itself included; only of those that are not alone in theirs."""


def live_ties(sites: Mapping[str, "Site"], targets: Mapping[str, torch.Tensor]) -> Ties:
    """Which sites share their runtime memory."""
    owners: dict[int, dict[str, str]] = defaultdict(dict)
    for name, site in sites.items():
        for target, _ in site.spots:
            owners[targets[target].data_ptr()][name] = target
    # Several parameters that were packed into one tensor have each their own elements of it.
    tied = [tuple(group) for group in owners.values() if len(set(group.values())) > 1]
    return {name: group for group in tied for name in group}


def require_equal(atlas: "Atlas", touched: Iterable[str], moves: Iterable[Move]) -> None:
    """Raises `tied_tensor` if the moves, each site's alone, would leave tied sites with different values."""
    groups = {atlas.ties[name] for name in touched if name in atlas.ties}
    if not groups:
        return
    by_target: dict[str, list[Move]] = defaultdict(list)
    for move in moves:
        by_target[move.target].append(move)
    for group in groups:
        first, *others = (_after(atlas, atlas.sites[name].source, by_target) for name in group)
        if not all(torch.equal(first, other) for other in others):
            tensors = sorted(region.tensor for name in group for region in atlas.into.get(name, ()))
            raise ProblemError(
                Code.TIED_TENSOR,
                f"{' and '.join(dict.fromkeys(tensors))} are one tensor on the engine, and the transaction "
                "would leave them different: send the same for each",
            )


def _after(atlas: "Atlas", target: str, moves: Mapping[str, list[Move]]) -> torch.Tensor:
    """Bits of a target after its own moves."""
    flat = atlas.targets[target].clone()
    for move in moves.get(target, ()):
        move.write(flat)
    return bits_of(flat)
