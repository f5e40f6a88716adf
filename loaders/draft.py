"""A write as an upload asks for it, and the checks of its form that need no byte of its values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from loaders.catalogue import Place
from loaders.header import TensorEntry
from loaders.names import canonical, is_scale, parse_expert
from loaders.refusal import Fault, fault, fixed, refuse_any, shown
from loaders.shapes import same_elements
from schemas.bridge import IndexSpan, Span, TensorWrite
from schemas.dtypes import Dtype
from schemas.problems import Code


@dataclass(frozen=True)
class Draft:
    """New values for one place; with `indices`, for those positions of it only."""

    where: str
    """How errors call it: `patches[3]`, or the tensor's name in the body."""
    place: Place
    values: TensorEntry
    indices: TensorEntry | None = None

    @property
    def numel(self) -> int:
        """Elements of the place."""
        return prod(self.place.shape)

    @property
    def number(self) -> Dtype:
        """What the values are numbers of: bytes that scale a packed weight are exponents."""
        tensor = self.place.tensor
        return Dtype.F8_E8M0 if tensor.dtype is Dtype.U8 and is_scale(tensor.name) else tensor.dtype

    @property
    def slice_numel(self) -> int | None:
        """Elements of one expert, if this goes to positions all over a tensor that stacks experts."""
        parts = parse_expert(canonical(self.place.tensor.name))
        if self.indices is None or self.place.expert is not None or parts is None or parts.expert is not None:
            return None
        return prod(self.place.shape[1:])

    def write(self, experts: tuple[int, ...] | None = None) -> TensorWrite:
        """What the engine is told, and of which `experts` the positions are if that was looked at."""
        return TensorWrite(
            tensor=self.place.tensor.name,
            expert=self.place.expert,
            values=Span(offset=self.values.begin, nbytes=self.values.nbytes),
            indices=self.indices
            and IndexSpan(offset=self.indices.begin, nbytes=self.indices.nbytes, dtype=self.indices.dtype),
            experts=experts,
        )


def check_form(drafts: Sequence[Draft]) -> None:
    """Raises `tensor_unsupported`, `wrong_dtype` or `wrong_shape`, listing all drafts that have the fault."""
    refuse_any(Code.TENSOR_UNSUPPORTED, _unsupported(drafts))
    refuse_any(Code.WRONG_DTYPE, _wrong_dtypes(drafts))
    refuse_any(Code.WRONG_SHAPE, _wrong_shapes(drafts))


def _unsupported(drafts: Sequence[Draft]) -> Iterator[Fault]:
    for draft in drafts:
        yield from fixed(draft.where, draft.place.tensor)


def _wrong_dtypes(drafts: Sequence[Draft]) -> Iterator[Fault]:
    for draft in drafts:
        expected, received = draft.place.tensor.dtype, draft.values.dtype
        if received is not expected:
            yield fault(
                draft.where,
                f"{shown(draft.values.name)} is {received}, but {draft.place.tensor.name} is {expected}",
                expected=expected,
                received=received,
            )
        if draft.indices and draft.indices.dtype not in (Dtype.I32, Dtype.I64):
            yield fault(
                draft.where,
                f"The indices {shown(draft.indices.name)} are {draft.indices.dtype}, not I32 or I64",
                expected="I32 or I64",
                received=draft.indices.dtype,
            )


def _wrong_shapes(drafts: Sequence[Draft]) -> Iterator[Fault]:
    for draft in drafts:
        if draft.indices is None:
            if not draft.place.takes(draft.values.shape):
                yield _wrong_shape(draft, draft.values, str(list(draft.place.shape)))
        elif len(draft.indices.shape) != 1:
            yield _wrong_shape(draft, draft.indices, "a list of one dimension")
        elif not same_elements(draft.values.shape, draft.indices.shape):
            yield _wrong_shape(draft, draft.values, f"{list(draft.indices.shape)}, as its indices have")


def _wrong_shape(draft: Draft, entry: TensorEntry, expected: str) -> Fault:
    return fault(
        draft.where,
        f"{shown(entry.name)} has shape {list(entry.shape)} where {draft.place.tensor.name} needs {expected}",
        expected=expected,
        received=list(entry.shape),
    )
