"""From a staged file to a checked upload: one expert, a patch batch, or a plain safetensors file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from loaders.catalogue import Catalogue, ExpertLayout
from loaders.contents import check_bools, check_finite, check_indices, check_ties, experts_of
from loaders.draft import Draft, check_form
from loaders.header import Header
from loaders.names import other_parts
from loaders.patch_list import METADATA_KEY, draft_patches
from loaders.refusal import Fault, clip, fault, refuse_any, shown, unknown_names
from loaders.staged import StagedFile
from loaders.unloaded import Files, check_unloaded, no_files
from loaders.values import opened
from schemas.bridge import StagedUpload
from schemas.problems import Code, ProblemError

Kind = Literal["expert", "patches", "plain"]


@dataclass(frozen=True)
class CheckedUpload:
    """A body whose every name, shape, dtype and value has been checked against the model."""

    upload: StagedUpload
    kind: Kind
    tensors: int
    """Checkpoint tensors that are written to."""
    elements: int
    """Elements written, repeated ones counted as often as they are written."""
    density: float
    """Share of the elements of the tensors and slices it names that it writes; at most 1."""
    nbytes: int
    """Bytes of new values."""
    names: tuple[str, ...]
    """The checkpoint tensors that are written to, in the order of their first write."""


def check_expert(
    staged: StagedFile,
    catalogue: Catalogue,
    layer: int,
    expert: int,
    partial: bool,
    allow_nonfinite: bool,
    files: Files = no_files,
) -> CheckedUpload:
    """Check the tensors of one expert; `partial` allows a subset of them. Blocking.

    `files` give the checkpoint, which is looked at if tensors are sent that the engine does not load.

    Raises `unknown_expert`, `unknown_tensor`, `duplicate_tensor`, `missing_tensor`, `bad_patch` (a patch
    list in the metadata) and what `_checked` raises.
    """
    layout = catalogue.experts(layer, expert)
    if METADATA_KEY in staged.header.metadata:
        raise ProblemError(
            Code.BAD_PATCH, "An expert upload carries no patch list; POST it as a patch batch."
        )
    drafts = _draft_expert(staged.header, layout)
    if drafts and not partial:
        refuse_any(Code.MISSING_TENSOR, _missing(layout, drafts))
    return _checked(staged, "expert", drafts, allow_nonfinite, files)


def check_batch(
    staged: StagedFile, catalogue: Catalogue, allow_nonfinite: bool, files: Files = no_files
) -> CheckedUpload:
    """Check a patch batch, or a plain file if the metadata has no `patches`; `files` as above. Blocking.

    Raises `unknown_tensor`, `duplicate_tensor`, `bad_patch` and what `_checked` raises.
    """
    if METADATA_KEY in staged.header.metadata:
        return _checked(staged, "patches", draft_patches(staged.header, catalogue), allow_nonfinite, files)
    return _checked(staged, "plain", _draft_plain(staged.header, catalogue), allow_nonfinite, files)


def _checked(
    staged: StagedFile, kind: Kind, drafts: Sequence[Draft], allow_nonfinite: bool, files: Files
) -> CheckedUpload:
    """Check form, then bytes.

    A write of no element is dropped; when nothing else is left the upload is refused, with
    `nothing_to_apply`. What the engine does not load is compared, and dropped as well. Raises
    `tensor_unsupported`, `wrong_dtype`, `wrong_shape`, `bad_index`, `bad_value`, `nonfinite`
    and `tied_tensor`.
    """
    check_form(drafts)
    drafts = [draft for draft in drafts if draft.values.nbytes]
    if not drafts:
        raise ProblemError(Code.NOTHING_TO_APPLY, "The body holds no element to write.")
    with opened(staged.path) as descriptor:
        drafts = check_unloaded(descriptor, drafts, files)
        check_indices(descriptor, drafts)
        check_bools(descriptor, drafts)
        if not allow_nonfinite:
            check_finite(descriptor, drafts)
        check_ties(descriptor, drafts)
        experts = experts_of(descriptor, drafts)
    names = tuple(dict.fromkeys(draft.place.tensor.name for draft in drafts))
    return CheckedUpload(
        upload=StagedUpload(
            path=str(staged.path),
            nbytes=staged.nbytes,
            blake3=staged.blake3,
            writes=tuple(draft.write(found) for draft, found in zip(drafts, experts, strict=True)),
        ),
        kind=kind,
        tensors=len(names),
        elements=sum(draft.values.numel for draft in drafts),
        density=_density(drafts),
        nbytes=sum(draft.values.nbytes for draft in drafts),
        names=names,
    )


def _density(drafts: Sequence[Draft]) -> float:
    places = {(draft.place.tensor.name, draft.place.expert): draft.numel for draft in drafts}
    if not places:  # all of it was as the engine left it in the checkpoint
        return 0.0
    return min(1.0, sum(draft.values.numel for draft in drafts) / sum(places.values()))


def _draft_expert(header: Header, layout: ExpertLayout) -> list[Draft]:
    """One draft per tensor of the body."""
    unknown = [name for name in header.entries if layout.find(name) is None]
    if unknown:
        raise unknown_names(unknown, layout.nearest)
    drafts = [
        Draft(name, slot.place, entry)
        for name, entry in header.entries.items()
        if (slot := layout.find(name)) is not None
    ]
    refuse_any(Code.DUPLICATE_TENSOR, _duplicates(drafts))
    return drafts


def _missing(layout: ExpertLayout, drafts: Sequence[Draft]) -> Iterator[Fault]:
    """Tensors of the expert that the body lacks: first those of which it has the weight, or the scale.

    What the engine does not load may be missing.
    """
    sent = {draft.place.tensor.name: draft.where for draft in drafts}
    loaded = [slot for slot in layout.slots if slot.place.tensor.loaded]
    held = {slot.upload.name: sent.get(slot.place.tensor.name) for slot in loaded}
    halves = {
        name: next(filter(None, map(held.get, other_parts(name))), None)
        for name, where in held.items()
        if where is None
    }
    allowed = "`?partial=true` allows to send only some of the tensors"
    for name in sorted(halves, key=lambda name: halves[name] is None):
        half = halves[name]
        if half is None:
            yield fault(name, f"{name} is missing; {allowed}")
        else:
            yield fault(name, f"{shown(half)} comes without {name}; {allowed}", half=clip(half))


def _draft_plain(header: Header, catalogue: Catalogue) -> list[Draft]:
    """One draft per tensor of the body."""
    places = {name: catalogue.place(name) for name in header.entries}
    unknown = [name for name, place in places.items() if place is None]
    if unknown:
        refusal = catalogue.unknown(unknown)
        raise _meant_as_expert(refusal) if all(map(catalogue.within_expert, unknown)) else refusal
    drafts = [Draft(name, place, header.entries[name]) for name, place in places.items() if place is not None]
    refuse_any(Code.DUPLICATE_TENSOR, _duplicates(drafts))
    return drafts


def _meant_as_expert(refusal: ProblemError) -> ProblemError:
    """The refusal of names that say which tensors of an expert these are, but not of which expert."""
    detail = (
        "The tensors are named as those of one expert, which does not say of which: "
        "PUT the file to experts/{layer}/{expert}, as `graft push-expert LAYER EXPERT FILE` does."
    )
    return ProblemError(refusal.code, detail, **refusal.members)


def _duplicates(drafts: Sequence[Draft]) -> Iterator[Fault]:
    """Drafts for a place that another name of the body stands for too, in part or as a whole."""
    taken: dict[str, dict[int | None, str]] = {}
    for draft in drafts:
        by_expert = taken.setdefault(draft.place.tensor.name, {})
        other = by_expert.get(draft.place.expert) or by_expert.get(None)
        if draft.place.expert is None:
            other = next(iter(by_expert.values()), None)
        if other is not None:
            detail = f"{shown(other)} and {shown(draft.where)} are names for the same weights"
            yield fault(draft.where, detail, tensor=draft.place.tensor.name)
        by_expert.setdefault(draft.place.expert, draft.where)
