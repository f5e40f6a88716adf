"""The header parser against hand-written attacks and against the safetensors library."""

import ctypes
import json
from math import prod
from typing import Any

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.header import (
    Header,
    HeaderFeed,
    HeaderLimits,
    check_file_length,
    parse_header,
)
from schemas.dtypes import Dtype
from schemas.problems import Code, ProblemError
from tests.loaders.attacks import ATTACKS, Attack
from tests.loaders.bodies import body, entries, entry, f32, raw

LIMITS = HeaderLimits()


def whole(content: bytes) -> Header:
    """Parse a complete body as `receive_body` does: the header, then the length."""
    header = parse_header(content, LIMITS)
    check_file_length(header.nbytes, len(content))
    return header


def library_tensors(content: bytes) -> list[tuple[str, dict[str, Any]]]:
    """What the safetensors library reads in the body."""
    found: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    return found


def library_accepts(content: bytes) -> bool:
    """Whether the safetensors library reads the body."""
    try:
        library_tensors(content)
    except safetensors.SafetensorError:
        return False
    return True


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.id)
def test_attack_is_refused(attack: Attack) -> None:
    """Every malformed body is refused with its code, and a text of bounded length."""
    with pytest.raises(ProblemError) as refusal:
        whole(attack.body)
    assert refusal.value.code is attack.code
    assert len(json.dumps(refusal.value.problem().model_dump(mode="json"))) < 3000


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.id)
def test_attack_is_refused_as_a_stream(attack: Attack) -> None:
    """The same body fed byte by byte (the long ones: in small pieces) is refused with the same code."""
    size = 1 + len(attack.body) // 5000
    pieces = (attack.body[at : at + size] for at in range(0, len(attack.body), size))
    with pytest.raises(ProblemError) as refusal:
        feed = HeaderFeed(LIMITS)
        if not any(feed.feed(piece) for piece in pieces):
            raise feed.ended()
        check_file_length(feed.header().nbytes, len(attack.body))
    assert refusal.value.code is attack.code


def test_attack_ids_are_unique() -> None:
    """No attack hides another one in reports."""
    assert len({attack.id for attack in ATTACKS}) == len(ATTACKS)


def test_right_file() -> None:
    """Offsets count from the start of the file; metadata and order are kept; scalars are fine."""
    content = body({"b": f32(1, 2), "none": f32(shape=(0, 7)), "a": f32(3, shape=())}, {"format": "pt"})
    header = whole(content)
    start = len(content) - 12
    assert list(header.entries) == ["b", "none", "a"]
    assert header.metadata == {"format": "pt"}
    assert header.nbytes == len(content)
    found = header.entries["a"]
    assert (found.dtype, found.shape, found.begin, found.end) == (Dtype.F32, (), start + 8, start + 12)
    assert (found.nbytes, found.numel) == (4, 1)
    assert header.entries["none"].numel == 0


def test_padding_after_the_object_is_fine() -> None:
    """Writers pad the header with spaces to a multiple of 8."""
    assert whole(raw('{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}   ', b"\0")).nbytes


def test_limits_are_exact() -> None:
    """A header of the limit's size passes, one byte more does not; so with names."""
    text = '{"ww":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}'
    content = raw(text, b"\0")
    parse_header(content, HeaderLimits(nbytes=len(text), name_chars=2))
    for limits in (HeaderLimits(nbytes=len(text) - 1), HeaderLimits(name_chars=1)):
        with pytest.raises(ProblemError):
            parse_header(content, limits)


def test_lengths_are_told() -> None:
    """A wrong length is refused with the expected and the received count, in the text and as members."""
    content = body({"w": f32(1, 2)})
    for wrong in (content[:-3], content + b"12345"):
        with pytest.raises(ProblemError) as refusal:
            whole(wrong)
        counts = {"expected": len(content), "received": len(wrong)}
        assert refusal.value.members == counts
        assert all(str(count) in refusal.value.detail for count in counts.values())


def test_stream_is_refused_at_the_eighth_byte() -> None:
    """A feed refuses a wrong length, or one that the announced total cannot hold, before the JSON comes."""
    feed = HeaderFeed(LIMITS)
    assert not feed.feed(b"\xff" * 7)
    with pytest.raises(ProblemError):
        feed.feed(b"\xff")
    with pytest.raises(ProblemError):
        HeaderFeed(LIMITS, total=20).feed((13).to_bytes(8, "little"))


@given(data=st.data())
def test_feed_needs_no_more_than_the_header(data: st.DataObject) -> None:
    """However a body is cut into chunks, the feed is ready with the chunk that completes the header."""
    content = body({"w": f32(*range(20))}, {"k": "v" * 50})
    start = len(content) - 80
    feed = HeaderFeed(LIMITS)
    at = 0
    while at < len(content):
        size = data.draw(st.integers(1, len(content) - at))
        ready = feed.feed(content[at : at + size])
        at += size
        assert ready == (at >= start)
    assert feed.header() == whole(content)


_INTEGERS = st.one_of(
    st.integers(-2, 12), st.sampled_from([2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63)])
)
_SCALARS = st.one_of(_INTEGERS, st.booleans(), st.none(), st.floats(), st.text(max_size=3))
_SHAPES = st.one_of(st.lists(st.integers(0, 3), max_size=3), st.lists(_SCALARS, max_size=3), _SCALARS)
_OFFSETS = st.one_of(
    st.tuples(st.integers(0, 8), st.integers(0, 8)), st.lists(_SCALARS, max_size=3), _SCALARS
)
_DTYPES = st.one_of(st.sampled_from([*map(str, Dtype), "F4", "u8", ""]), _SCALARS)
_ENTRIES = st.one_of(
    st.fixed_dictionaries({"dtype": _DTYPES, "shape": _SHAPES, "data_offsets": _OFFSETS}),
    st.fixed_dictionaries(
        {"dtype": _DTYPES, "shape": _SHAPES}, optional={"data_offsets": _OFFSETS, "more": _SCALARS}
    ),
    _SCALARS,
)
_HEADERS = st.dictionaries(
    st.one_of(st.sampled_from(["a", "b", "__metadata__"]), st.text(max_size=3)),
    st.one_of(_ENTRIES, st.dictionaries(st.text(max_size=2), _SCALARS, max_size=2)),
    max_size=3,
)


@st.composite
def nearly_right(draw: st.DrawFn) -> bytes:
    """A tiling file with at most a few numbers changed, a length off by little, or bytes flipped."""
    sizes = draw(st.lists(st.integers(0, 4), max_size=4))
    header: dict[str, Any] = {}
    at = 0
    for position, size in enumerate(sizes):
        dtype = draw(st.sampled_from([Dtype.U8, Dtype.BF16, Dtype.F32]))
        nbytes = size * dtype.nbytes
        header[f"t{position}"] = entry(dtype, [size], [at, at + nbytes])
        at += nbytes
    for found in header.values():
        if draw(st.integers(0, 4)) == 0:
            found["data_offsets"][draw(st.integers(0, 1))] += draw(st.integers(-3, 3))
        if draw(st.integers(0, 6)) == 0:
            found["shape"].append(draw(st.integers(0, 2)))
    content = bytearray(entries(header, bytes(max(0, at + draw(st.sampled_from([0, 0, 0, -1, 1]))))))
    if draw(st.booleans()):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content)


@settings(max_examples=400)
@given(
    st.one_of(
        nearly_right(),
        st.builds(lambda header, size: entries(header, bytes(size)), _HEADERS, st.integers(0, 9)),
    )
)
def test_never_laxer_than_the_library(content: bytes) -> None:
    """What Graft accepts, the safetensors library accepts; all else is a refusal, not another exception."""
    try:
        header = whole(content)
    except ProblemError:
        return
    assert library_accepts(content)
    found = {name: (info["dtype"], tuple(info["shape"])) for name, info in library_tensors(content)}
    assert found == {name: (str(one.dtype), one.shape) for name, one in header.entries.items()}


_WRITERS_NAMES = {
    Dtype.BOOL: "bool",
    Dtype.U8: "uint8",
    Dtype.I8: "int8",
    Dtype.F8_E4M3: "float8_e4m3fn",
    Dtype.F8_E5M2: "float8_e5m2",
    Dtype.F8_E8M0: "float8_e8m0fnu",
    Dtype.U16: "uint16",
    Dtype.I16: "int16",
    Dtype.F16: "float16",
    Dtype.BF16: "bfloat16",
    Dtype.U32: "uint32",
    Dtype.I32: "int32",
    Dtype.F32: "float32",
    Dtype.U64: "uint64",
    Dtype.I64: "int64",
    Dtype.F64: "float64",
}
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@settings(max_examples=150)
@given(
    tensors=st.dictionaries(
        _TEXT.filter(lambda name: name not in ("", "__metadata__")),
        st.tuples(st.sampled_from(list(Dtype)), st.lists(st.integers(0, 3), max_size=4)),
        min_size=1,
        max_size=5,
    ),
    metadata=st.dictionaries(_TEXT, _TEXT, max_size=3),
)
def test_accepts_what_the_library_writes(
    tensors: dict[str, tuple[Dtype, list[int]]], metadata: dict[str, str]
) -> None:
    """Every file that the safetensors library writes parses, with its names, dtypes, shapes and metadata."""
    zeros = ctypes.create_string_buffer(4096)
    specs = {
        name: safetensors.TensorSpec(
            dtype=_WRITERS_NAMES[dtype],
            shape=shape,
            data_ptr=ctypes.addressof(zeros),
            data_len=dtype.nbytes * prod(shape),
        )
        for name, (dtype, shape) in tensors.items()
    }
    header = whole(safetensors.serialize(specs, metadata))
    assert header.metadata == metadata
    assert {name: (one.dtype, list(one.shape)) for name, one in header.entries.items()} == tensors


STRICTER = {
    "leading space",
    "leading newline",
    "name twice",
    "name twice, once escaped",
    "metadata key twice",
    "metadata null",
    "empty name",
    "endless name",
    "entry list",
    "extra field",
    "half-byte dtype",
    "rank 65",
}
"""Attacks that the library reads: it takes the last of two names, fields in order, and so on."""


def test_attacks_that_the_library_accepts() -> None:
    """Where Graft is stricter is known: a library that catches up, or a new leniency, shows here."""
    assert {attack.id for attack in ATTACKS if library_accepts(attack.body)} == STRICTER


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_properly(content: bytes) -> None:
    """Random bytes give a refusal or a header, never another exception."""
    for candidate in (content, raw(content), raw(b"{" + content)):
        try:
            whole(candidate)
        except ProblemError as error:
            assert error.code in Code
