"""Checks of the bytes of an upload's values and indices against the places that they go to."""

from collections.abc import Iterator, Sequence

from loaders import values
from loaders.draft import Draft
from loaders.header import TensorEntry
from loaders.refusal import fault, listed, shown
from schemas.dtypes import Dtype
from schemas.problems import Code, ProblemError


def check_indices(descriptor: int, drafts: Sequence[Draft]) -> None:
    """Raises `bad_index` for a negative, too high or repeated index within one patch.

    Patches may share one list of indices: it is read once, against the smallest of their tensors.
    """
    smallest: dict[str, Draft] = {}
    for draft in drafts:
        if draft.indices is not None:
            known = smallest.setdefault(draft.indices.name, draft)
            if draft.numel < known.numel:
                smallest[draft.indices.name] = draft
    for draft in smallest.values():
        if draft.indices is not None:
            _check_index_list(descriptor, draft, draft.indices)


def _check_index_list(descriptor: int, draft: Draft, entry: TensorEntry) -> None:
    span = (descriptor, entry.begin, entry.nbytes, entry.dtype)
    try:
        scan = values.scan_indices(*span)
        if scan.high >= draft.numel:
            raise values.IndexFault(
                f"is not below {draft.numel}, the number of elements",
                values.first_out_of_range(*span, draft.numel),
            )
        values.check_unique(*span, scan)
    except values.IndexFault as error:
        raise _bad_index(draft, entry, error) from None


def _bad_index(draft: Draft, entry: TensorEntry, error: values.IndexFault) -> ProblemError:
    which = "An index" if error.position is None else f"Index {error.position}"
    detail = f"{which} of {shown(entry.name)} ({draft.where}) {error.what}"
    members = {} if error.position is None else {"position": error.position}
    return listed(Code.BAD_INDEX, [fault(draft.where, detail, numel=draft.numel, **members)])


def experts_of(descriptor: int, drafts: Sequence[Draft]) -> list[tuple[int, ...] | None]:
    """For each draft the experts that its positions are of, if it is sparse over a stack and leaves some out.

    Patches may share one list of indices: it is read once for each size of an expert.
    """
    known: dict[tuple[str, int], tuple[int, ...]] = {}
    found: list[tuple[int, ...] | None] = []
    for draft in drafts:
        size, entry = draft.slice_numel, draft.indices
        if not size or entry is None:
            found.append(None)
            continue
        key = (entry.name, size)
        if key not in known:
            known[key] = values.blocks_of(descriptor, entry.begin, entry.nbytes, entry.dtype, size)
        found.append(known[key] if len(known[key]) < draft.place.shape[0] else None)
    return found


def check_bools(descriptor: int, drafts: Sequence[Draft]) -> None:
    """Raises `bad_value` for a BOOL that is neither 0 nor 1."""
    for draft, entry in _value_entries(drafts):
        if entry.dtype is Dtype.BOOL:
            at = values.first_not_bool(descriptor, entry.begin, entry.nbytes)
            if at is not None:
                raise _bad_value(Code.BAD_VALUE, draft, entry, at, "is neither 0 nor 1")


def check_finite(descriptor: int, drafts: Sequence[Draft]) -> None:
    """Raises `nonfinite` for a NaN or infinity."""
    for draft, entry in _value_entries(drafts):
        at = values.first_nonfinite(descriptor, entry.begin, entry.nbytes, draft.number)
        if at is not None:
            raise _bad_value(Code.NONFINITE, draft, entry, at, "is NaN or infinite")


def _value_entries(drafts: Sequence[Draft]) -> Iterator[tuple[Draft, TensorEntry]]:
    """Every tensor of values once for each kind of number that it is used as, in the order of the file."""
    users = {(draft.values.name, draft.number): draft for draft in reversed(drafts)}
    for draft in sorted(users.values(), key=lambda draft: draft.values.begin):
        yield draft, draft.values


def _bad_value(code: Code, draft: Draft, entry: TensorEntry, at: int, what: str) -> ProblemError:
    detail = f"Element {at} of {shown(entry.name)} {what}"
    return listed(code, [fault(draft.where, detail, position=at)])


def check_ties(descriptor: int, drafts: Sequence[Draft]) -> None:
    """Raises `tied_tensor` if tensors that share memory on the engine are written, but differently.

    Another upload of the transaction may write the one that is missing here; phase one looks at all.
    """
    tied = {draft.place.tensor.tied_to for draft in drafts} - {None}
    if not tied:
        return
    groups: dict[str, dict[str, list[Draft]]] = {}
    for draft in drafts:
        tensor = draft.place.tensor
        root = tensor.tied_to or tensor.name
        if root in tied:
            groups.setdefault(root, {}).setdefault(tensor.name, []).append(draft)
    for group in groups.values():
        first, *others = group.values()
        for other in others:
            if not _same_writes(descriptor, first, other):
                raise _differ(first[0], other[0])


def _same_writes(descriptor: int, first: Sequence[Draft], second: Sequence[Draft]) -> bool:
    """Whether two tensors get the same values at the same positions, one after the other."""
    return len(first) == len(second) and all(
        _same(descriptor, one.values, other.values) and _same(descriptor, one.indices, other.indices)
        for one, other in zip(first, second, strict=True)
    )


def _same(descriptor: int, one: TensorEntry | None, other: TensorEntry | None) -> bool:
    if one is None or other is None:
        return one is other
    return (
        one.dtype is other.dtype
        and one.nbytes == other.nbytes
        and values.same_bytes((descriptor, one.begin), (descriptor, other.begin), one.nbytes)
    )


def _differ(first: Draft, other: Draft) -> ProblemError:
    names = sorted((first.place.tensor.name, other.place.tensor.name))
    detail = (
        f"{names[0]} and {names[1]} are one tensor on the engine, but get different writes: "
        "send the same for both"
    )
    return listed(Code.TIED_TENSOR, [fault(other.where, detail, tensors=names)])
