"""What a version's weights consist of: the base and, over it, uploads in order. Pure functions."""

from collections.abc import Iterable, Iterator

from schemas.bridge import StagedUpload, TensorWrite

Lineage = tuple[StagedUpload, ...]
"""Uploads over the base, in the order of application, without writes that a later one covers."""
Place = tuple[str, int | None]
"""A whole checkpoint tensor, or one expert's slice of it."""


def compacted(uploads: Iterable[StagedUpload]) -> Lineage:
    """The same weights with fewer writes: without what a later dense write of the same place covers."""
    covered: set[Place] = set()
    kept: list[StagedUpload] = []
    for upload in reversed(tuple(uploads)):
        writes: list[TensorWrite] = []
        for write in reversed(upload.writes):
            if covered.isdisjoint(((write.tensor, None), (write.tensor, write.expert))):
                writes.append(write)
            if write.indices is None:
                covered.add((write.tensor, write.expert))
        if not writes:
            continue
        if len(writes) == len(upload.writes):
            kept.append(upload)  # itself: long histories share what they have in common
        else:
            kept.append(upload.model_copy(update={"writes": tuple(reversed(writes))}))
    return tuple(reversed(kept))


def blobs_of(lineage: Lineage) -> frozenset[str]:
    """Digests of the kept files that a lineage needs."""
    return frozenset(upload.blake3 for upload in lineage if not upload.external)


def stands_alone(lineage: Lineage) -> bool:
    """Whether it begins with a reload, which writes everything: then it does not matter over what."""
    return any(upload.external for upload in lineage)


def places_between(current: Lineage, target: Lineage) -> tuple[set[Place], Lineage]:
    """How to get from one lineage to another over the same base.

    The places to put back to the base first, and then the part of `target` to apply.
    """
    sliced = _sliced((*current, *target))
    old, new = _grouped(current, sliced), _grouped(target, sliced)
    differing = {group for group in old.keys() | new.keys() if old.get(group) != new.get(group)}
    reset = {group for group in differing if group in old}
    rest = []
    for upload in target:
        writes = tuple(write for write in upload.writes if _group(write, sliced) in differing)
        if writes:
            rest.append(upload.model_copy(update={"writes": writes}))
    return reset, tuple(rest)


def tensors_between(one: Lineage, other: Lineage) -> set[str]:
    """Tensors whose weights may differ between two lineages over the same base."""
    reset, rest = places_between(one, other)
    return {name for name, _ in reset} | {write.tensor for upload in rest for write in upload.writes}


def _sliced(uploads: Iterable[StagedUpload]) -> set[str]:
    """Tensors that are only ever written by experts' slices, so that each slice stands for itself."""
    writes = [write for upload in uploads for write in upload.writes]
    whole = {write.tensor for write in writes if write.expert is None}
    return {write.tensor for write in writes} - whole


def _group(write: TensorWrite, sliced: set[str]) -> Place:
    return write.tensor, write.expert if write.tensor in sliced else None


def _grouped(uploads: Lineage, sliced: set[str]) -> dict[Place, list[tuple[str, TensorWrite]]]:
    groups: dict[Place, list[tuple[str, TensorWrite]]] = {}
    for digest, write in _writes(uploads):
        groups.setdefault(_group(write, sliced), []).append((digest, write))
    return groups


def _writes(uploads: Lineage) -> Iterator[tuple[str, TensorWrite]]:
    for upload in uploads:
        for write in upload.writes:
            yield upload.blake3, write
