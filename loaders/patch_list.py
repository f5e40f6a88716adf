"""The patch list in a body's metadata: JSON text → `Patch`es → drafts of writes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from pydantic import ValidationError

from loaders import strict_json
from loaders.catalogue import Catalogue, Place
from loaders.draft import Draft
from loaders.header import Header, TensorEntry
from loaders.refusal import Fault, clip, fault, listed, refuse_any, shown
from schemas.patches import PATCHES, Patch
from schemas.problems import Code, ProblemError

METADATA_KEY = "patches"
"""Where the list stands in `__metadata__`."""


def draft_patches(header: Header, catalogue: Catalogue) -> list[Draft]:
    """The writes that a patch batch asks for, in order.

    Raises `bad_patch`, `nothing_to_apply`, `unknown_tensor`, and `wrong_dtype` or `wrong_shape` where
    what a patch declares is not what the checkpoint has.
    """
    patches = _parse(header.metadata[METADATA_KEY])
    if not patches:
        raise ProblemError(Code.NOTHING_TO_APPLY, "The patch list is empty.")
    places = _resolve(patches, catalogue)
    refuse_any(Code.WRONG_DTYPE, _wrong_dtypes(patches, places))
    refuse_any(Code.WRONG_SHAPE, _wrong_shapes(patches, places))
    refuse_any(Code.BAD_PATCH, _dangling(patches, header.entries))
    refuse_any(Code.BAD_PATCH, _unused(patches, header.entries))
    return [
        _draft(position, patch, places[patch.name], header.entries) for position, patch in enumerate(patches)
    ]


def _draft(position: int, patch: Patch, place: Place, entries: dict[str, TensorEntry]) -> Draft:
    """The write of one patch; dense values may come as a list, which is then given the tensor's shape."""
    values = entries[patch.values]
    if patch.indices is not None:
        return Draft(_where(position), place, values, entries[patch.indices])
    if values.shape == (prod(place.shape),):
        values = replace(values, shape=place.shape)
    return Draft(_where(position), place, values)


def _parse(text: str) -> list[Patch]:
    try:
        return PATCHES.validate_python(strict_json.loads(text))
    except strict_json.DuplicateKey as error:
        detail = f"`patches` names the key {shown(error.key)} twice in one object"
        raise listed(Code.BAD_PATCH, [fault(METADATA_KEY, detail)]) from None
    except ValidationError as error:
        raise listed(Code.BAD_PATCH, list(_form_faults(error))) from None
    except ValueError as error:
        detail = f"`patches` is not valid JSON: {error}"
        raise listed(Code.BAD_PATCH, [fault(METADATA_KEY, detail)]) from None


def _form_faults(error: ValidationError) -> Iterator[Fault]:
    """Where the list has the wrong form, without the values found there."""
    for found in error.errors(include_url=False, include_context=False, include_input=False):
        steps = (f"[{step}]" if isinstance(step, int) else f".{clip(step)}" for step in found["loc"])
        place = METADATA_KEY + "".join(steps)
        yield fault(place, f"{clip(place)}: {found['msg']}")


def _resolve(patches: Sequence[Patch], catalogue: Catalogue) -> dict[str, Place]:
    """Every name that patches use, once."""
    found = {name: catalogue.place(name) for name in dict.fromkeys(patch.name for patch in patches)}
    unknown = [name for name, place in found.items() if place is None]
    if unknown:
        raise catalogue.unknown(unknown)
    return {name: place for name, place in found.items() if place is not None}


def _wrong_dtypes(patches: Sequence[Patch], places: dict[str, Place]) -> Iterator[Fault]:
    for position, patch in enumerate(patches):
        tensor = places[patch.name].tensor
        if patch.dtype is not tensor.dtype:
            yield fault(
                f"{_where(position)}.dtype",
                f"{_where(position)} declares {patch.dtype}, but {tensor.name} is {tensor.dtype}",
                expected=tensor.dtype,
                received=patch.dtype,
            )


def _wrong_shapes(patches: Sequence[Patch], places: dict[str, Place]) -> Iterator[Fault]:
    for position, patch in enumerate(patches):
        place = places[patch.name]
        if not place.takes(patch.shape):
            of = place.tensor.name if place.expert is None else f"an expert of {place.tensor.name}"
            yield fault(
                f"{_where(position)}.shape",
                f"{_where(position)} declares another shape than {list(place.shape)} of {of}",
                expected=list(place.shape),
            )


def _dangling(patches: Sequence[Patch], entries: dict[str, TensorEntry]) -> Iterator[Fault]:
    for position, patch in enumerate(patches):
        for field, name in (("values", patch.values), ("indices", patch.indices)):
            if name is not None and name not in entries:
                place = f"{_where(position)}.{field}"
                yield fault(place, f"{place} names {shown(name)}, which is no tensor of the body")


def _unused(patches: Sequence[Patch], entries: dict[str, TensorEntry]) -> Iterator[Fault]:
    used = {patch.values for patch in patches} | {patch.indices for patch in patches}
    for name in entries:
        if name not in used:
            yield fault(name, f"No patch refers to the tensor {shown(name)} of the body")


def _where(position: int) -> str:
    return f"{METADATA_KEY}[{position}]"
