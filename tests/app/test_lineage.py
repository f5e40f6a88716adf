"""Lineages: less is sent, and the weights are the same."""

import random

import numpy as np
import pytest

from app.lineage import Lineage, Place, compacted, places_between
from schemas.bridge import IndexSpan, Span, StagedUpload, TensorWrite
from schemas.dtypes import Dtype

EXPERTS, SIZE = 3, 4
Weights = dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]


def dense(tensor: str, value: int, expert: int | None = None) -> TensorWrite:
    """All elements become `value`, which stands in for bytes of a file."""
    return TensorWrite(tensor=tensor, expert=expert, values=Span(offset=value, nbytes=1))


def sparse(tensor: str, value: int, index: int) -> TensorWrite:
    """One element becomes `value`."""
    indices = IndexSpan(offset=index, nbytes=1, dtype=Dtype.I64)
    return TensorWrite(tensor=tensor, values=Span(offset=value, nbytes=1), indices=indices)


def upload(number: int, *writes: TensorWrite) -> StagedUpload:
    """A file with these writes."""
    return StagedUpload(path="", nbytes=1, blake3=f"{number:064x}", writes=writes)


def base() -> Weights:
    """Two stacks of experts."""
    return {name: np.full((EXPERTS, SIZE), -1) for name in "ab"}


def applied(uploads: Lineage, weights: Weights) -> Weights:
    """`weights` after `uploads`."""
    for one in uploads:
        for write in one.writes:
            target = weights[write.tensor]
            if write.indices is not None:
                target.reshape(-1)[write.indices.offset] = write.values.offset
            elif write.expert is not None:
                target[write.expert] = write.values.offset
            else:
                target[:] = write.values.offset
    return weights


def reset(places: set[Place], weights: Weights) -> Weights:
    """`weights` with these places as in the base."""
    for tensor, expert in places:
        weights[tensor][... if expert is None else expert] = -1
    return weights


def some(rng: random.Random, value: int) -> TensorWrite:
    """Any write."""
    tensor = rng.choice(["a", "a", "b"])
    kind = rng.choice(["dense", "slice", "slice", "sparse"])
    if kind == "dense":
        return dense(tensor, value)
    if kind == "slice":
        return dense(tensor, value, rng.randrange(EXPERTS))
    return sparse(tensor, value, rng.randrange(EXPERTS * SIZE))


def history(rng: random.Random, length: int, begin: int = 0) -> list[StagedUpload]:
    """Uploads with values that occur once."""
    return [
        upload(n, *(some(rng, 10 * n + place) for place in range(rng.randint(1, 3))))
        for n in range(begin, begin + length)
    ]


def test_what_is_overwritten_is_not_sent() -> None:
    """A later dense write of the same tensor or slice covers earlier ones, and a whole tensor its slices."""
    lineage = compacted(
        [
            upload(1, dense("a", 1, 0), dense("b", 2), sparse("b", 3, 1)),
            upload(2, dense("a", 4, 1)),
            upload(3, dense("a", 5, 0)),
            upload(4, sparse("b", 6, 0)),
        ]
    )
    assert [int(one.blake3, 16) for one in lineage] == [1, 2, 3, 4]
    assert lineage[0].writes == (dense("b", 2), sparse("b", 3, 1))
    assert [int(u.blake3, 16) for u in compacted([*lineage, upload(5, dense("a", 7), dense("b", 8))])] == [5]


@pytest.mark.parametrize("seed", range(60))
def test_compacted_histories_have_the_same_weights(seed: int) -> None:
    """On random histories, whole or piece by piece, nothing that shows is left out."""
    uploads = history(random.Random(seed), 12)
    short = compacted(uploads)
    whole, less = applied(tuple(uploads), base()), applied(short, base())
    assert all((whole[name] == less[name]).all() for name in whole)
    assert compacted([*compacted(uploads[:7]), *uploads[7:]]) == short


@pytest.mark.parametrize("seed", range(60))
def test_the_way_between_two_lineages(seed: int) -> None:
    """From any lineage to any other that shares some past, over places of the base and part of the target."""
    rng = random.Random(seed)
    past = history(rng, rng.randrange(5))
    current = compacted([*past, *history(rng, rng.randrange(5), 100)])
    target = compacted([*past, *history(rng, rng.randrange(5), 200)])
    places, rest = places_between(current, target)
    found = applied(rest, reset(places, applied(current, base())))
    expected = applied(target, base())
    assert all((found[name] == expected[name]).all() for name in expected)


def test_lineages_share_what_they_have_in_common() -> None:
    """An upload that nothing covers is the same object in the next lineage, so that histories stay small."""
    first = compacted([upload(1, dense("a", 1)), upload(2, sparse("b", 2, 0))])
    second = compacted([*first, upload(3, sparse("b", 3, 0))])
    assert all(one is other for one, other in zip(first, second[:2], strict=True))


def test_what_does_not_differ_is_left_alone() -> None:
    """An expert that was not touched since is neither put back to the base nor sent again."""
    past = [upload(1, dense("a", 1, 0)), upload(2, dense("b", 2))]
    current = compacted([*past, upload(3, dense("a", 3, 1))])
    assert places_between(current, tuple(past)) == ({("a", 1)}, ())
