"""The safetensors header: raw bytes become a checked `Header` through one conversion, or are refused."""

from dataclasses import dataclass

from loaders import strict_json
from loaders.refusal import clip, shown
from schemas.dtypes import Dtype
from schemas.problems import Code, ProblemError

PREFIX_NBYTES = 8
"""A file starts with the length of its header: 8 bytes, little-endian."""
MAX_RANK = 64
"""Dimensions of a tensor; torch allows no more."""
_MAX_INT = 2**63 - 1
_METADATA = "__metadata__"
_FIELDS = frozenset(("dtype", "shape", "data_offsets"))
_DTYPES = {str(dtype): dtype for dtype in Dtype}


@dataclass(frozen=True)
class HeaderLimits:
    """What a header may measure: bytes of its JSON, characters of a tensor's name."""

    nbytes: int = 16 << 20
    name_chars: int = 1024


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file; `begin` and `end` are byte offsets in the file, not in its data section."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin

    @property
    def numel(self) -> int:
        """Elements of the tensor; 1 for a scalar."""
        return self.nbytes // self.dtype.nbytes


@dataclass(frozen=True)
class Header:
    """A checked header: its tensors tile the data without holes or overlaps."""

    entries: dict[str, TensorEntry]
    """By name, in the order of the header's JSON."""
    metadata: dict[str, str]
    nbytes: int
    """Size of the whole file that the header implies."""


def header_length(prefix: bytes | bytearray, limits: HeaderLimits) -> int:
    """Bytes of the JSON that follows the first 8 bytes of a file.

    Raises `header_length` if it is under 2 or over the limit.
    """
    length = int.from_bytes(prefix[:PREFIX_NBYTES], "little")
    if length < 2 or length > limits.nbytes:
        raise ProblemError(
            Code.HEADER_LENGTH,
            f"The first 8 bytes announce a safetensors header of {length} bytes; "
            f"it must have 2 to {limits.nbytes}. Is the body a safetensors file?",
            length=length,
            limit=limits.nbytes,
        )
    return length


def check_file_length(expected: int, received: int) -> None:
    """Raises `header_offsets` unless a file has the size that its header implies."""
    if received != expected:
        relation = "truncated" if received < expected else "followed by bytes that belong to no tensor"
        raise ProblemError(
            Code.HEADER_OFFSETS,
            f"The header implies a file of {expected} bytes, but the body has {received}: it is {relation}.",
            expected=expected,
            received=received,
        )


class HeaderFeed:
    """Collects a stream's start until the header is complete; holds at most the header itself."""

    def __init__(self, limits: HeaderLimits, total: int | None = None) -> None:
        """`total`: bytes of the whole file if that is known in advance."""
        self._limits = limits
        self._total = total
        self._buffer = bytearray()
        self._need: int | None = None

    def feed(self, chunk: bytes) -> bool:
        """Take the next bytes; True once `header()` can be called. Raises `header_length`."""
        if self._need is None:
            head = chunk[: PREFIX_NBYTES - len(self._buffer)]
            self._buffer += head
            if len(self._buffer) < PREFIX_NBYTES:
                return False
            self._need = PREFIX_NBYTES + header_length(self._buffer, self._limits)
            if self._total is not None:
                _check_fits(self._need, self._total)
            chunk = chunk[len(head) :]
        self._buffer += chunk[: self._need - len(self._buffer)]
        return len(self._buffer) == self._need

    @property
    def least(self) -> int:
        """Bytes that the whole file has at least, as far as its start tells."""
        return self._need or len(self._buffer)

    def ended(self) -> ProblemError:
        """The refusal if the stream ends now, before its header is complete."""
        return _ends_early(self._need or PREFIX_NBYTES, len(self._buffer))

    def header(self) -> Header:
        """Parse what was collected; blocking. Raises as `parse_header`."""
        return parse_header(self._buffer, self._limits)


def parse_header(prefix: bytes | bytearray, limits: HeaderLimits) -> Header:
    """The header at the start of a file; `prefix` must hold all of it and may go on after it.

    As strict as the safetensors reader, and stricter: unknown dtypes and fields, keys
    named twice and over-long names are refused. Raises `header_length`, `header_json`,
    `header_duplicate`, `header_entry`, `header_metadata`, `header_offsets`, `unknown_dtype`.
    """
    _check_fits(PREFIX_NBYTES, len(prefix))
    start = PREFIX_NBYTES + header_length(prefix, limits)
    _check_fits(start, len(prefix))
    found = _parse_object(prefix[PREFIX_NBYTES:start])
    metadata = _metadata(found.pop(_METADATA)) if _METADATA in found else {}
    entries = {name: _entry(name, found.pop(name), start, limits) for name in list(found)}
    return Header(entries, metadata, _tile(entries, start))


def _check_fits(expected: int, received: int) -> None:
    """Refuse a body that ends before its header does."""
    if received < expected:
        raise _ends_early(expected, received)


def _ends_early(expected: int, received: int) -> ProblemError:
    return ProblemError(
        Code.HEADER_LENGTH,
        f"The body ends inside its header: that takes {expected} bytes, but the body has {received}.",
        expected=expected,
        received=received,
    )


def _parse_object(raw: bytes | bytearray) -> dict[str, object]:
    """The header's JSON object."""
    if raw[:1] != b"{":
        raise ProblemError(Code.HEADER_JSON, "The header does not start with `{`.")
    try:
        found = strict_json.loads(raw.decode())
    except strict_json.DuplicateKey as error:
        raise ProblemError(
            Code.HEADER_DUPLICATE, f"The header names {shown(error.key)} twice.", name=clip(error.key)
        ) from None
    except UnicodeDecodeError:
        raise ProblemError(Code.HEADER_JSON, "The header is not UTF-8.") from None
    except ValueError as error:
        raise ProblemError(Code.HEADER_JSON, f"The header is not valid JSON: {error}.") from None
    assert isinstance(found, dict)  # it starts with `{`
    return found


def _metadata(raw: object) -> dict[str, str]:
    if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
        raise ProblemError(Code.HEADER_METADATA, "`__metadata__` must map strings to strings.")
    return raw


def _entry(name: str, raw: object, start: int, limits: HeaderLimits) -> TensorEntry:
    """One tensor's entry; `start` is where the data section begins in the file."""
    if not name or len(name) > limits.name_chars:
        raise _bad_entry(name, f"a name must have 1 to {limits.name_chars} characters")
    if not isinstance(raw, dict) or raw.keys() != _FIELDS:
        raise _bad_entry(name, "an entry has exactly `dtype`, `shape` and `data_offsets`")
    dtype = _dtype(name, raw["dtype"])
    shape = _shape(name, raw["shape"])
    begin, end = _offsets(name, raw["data_offsets"])
    nbytes = _nbytes(name, dtype, shape)
    if end - begin != nbytes:
        raise _bad_entry(
            name,
            f"{dtype} of shape {list(shape)} takes {nbytes} bytes, but its offsets span {end - begin}",
            expected=nbytes,
            received=end - begin,
        )
    return TensorEntry(name, dtype, shape, start + begin, start + end)


def _dtype(name: str, raw: object) -> Dtype:
    dtype = _DTYPES.get(raw) if isinstance(raw, str) else None
    if dtype is None:
        raise ProblemError(
            Code.UNKNOWN_DTYPE,
            f"The dtype of tensor {shown(name)} is none of {', '.join(_DTYPES)}.",
            name=clip(name),
            known=list(_DTYPES),
        )
    return dtype


def _shape(name: str, raw: object) -> tuple[int, ...]:
    if not isinstance(raw, list) or not all(_is_size(size) for size in raw):
        raise _bad_entry(name, "`shape` must be a list of integers from 0 to 2^63-1")
    if len(raw) > MAX_RANK:
        raise _bad_entry(name, f"`shape` may have at most {MAX_RANK} dimensions")
    return tuple(raw)


def _offsets(name: str, raw: object) -> tuple[int, int]:
    if not isinstance(raw, list) or len(raw) != 2 or not all(_is_size(offset) for offset in raw):
        raise _bad_entry(name, "`data_offsets` must be two integers from 0 to 2^63-1")
    begin, end = raw
    if end < begin:
        raise _bad_entry(name, "`data_offsets` end before they begin")
    return begin, end


def _nbytes(name: str, dtype: Dtype, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor, refused as soon as a product leaves 63 bits, even if a later size is 0."""
    numel = 1
    for size in shape:
        numel *= size
        if numel > _MAX_INT:
            raise _bad_entry(name, "the number of elements of `shape` overflows")
    nbytes = numel * dtype.nbytes
    if nbytes > _MAX_INT:
        raise _bad_entry(name, "the number of bytes of `shape` overflows")
    return nbytes


def _is_size(value: object) -> bool:
    """An integer that is no bool and fits a signed 64-bit word."""
    return type(value) is int and 0 <= value <= _MAX_INT


def _tile(entries: dict[str, TensorEntry], start: int) -> int:
    """Where the data ends, if the tensors cover it without hole or overlap."""
    reached = start
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != reached:
            fault = "leaves a hole before it" if entry.begin > reached else "overlaps another one"
            raise ProblemError(
                Code.HEADER_OFFSETS,
                f"Tensor {shown(entry.name)} {fault}: its data begins at {entry.begin - start}, "
                f"the data before it ends at {reached - start}.",
                name=clip(entry.name),
                expected=reached - start,
                received=entry.begin - start,
            )
        reached = entry.end
    return reached


def _bad_entry(name: str, fault: str, **members: int) -> ProblemError:
    return ProblemError(
        Code.HEADER_ENTRY,
        f"The header entry {shown(name)} is malformed: {fault}.",
        name=clip(name),
        **members,
    )
