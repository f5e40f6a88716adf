"""Malformed safetensors bodies of every kind, each with the code that refuses it."""

from dataclasses import dataclass

from schemas.problems import Code
from tests.loaders.bodies import entries, entry, raw


@dataclass(frozen=True)
class Attack:
    """A body that must be refused."""

    id: str
    body: bytes
    code: Code


_DATA = bytes(4)
_ENTRY = '"dtype":"U8","shape":[4],"data_offsets":[0,4]'


def _one(text: str, data: bytes = _DATA) -> bytes:
    """A body whose header has one tensor `w`, described by JSON text."""
    return raw('{"w":' + text + "}", data)


def _shape(text: str) -> bytes:
    return _one('{"dtype":"U8","shape":' + text + ',"data_offsets":[0,4]}')


def _offsets(text: str) -> bytes:
    return _one('{"dtype":"U8","shape":[4],"data_offsets":' + text + "}")


def _pair(first: tuple[int, int], second: tuple[int, int], data: int) -> bytes:
    header = {
        name: entry(shape=[end - begin], offsets=[begin, end])
        for name, (begin, end) in (("a", first), ("b", second))
    }
    return entries(header, bytes(data))


def _metadata(text: str) -> bytes:
    return raw('{"__metadata__":' + text + ',"w":{' + _ENTRY + "}}", _DATA)


_GOOD = _one("{" + _ENTRY + "}")

ATTACKS = (
    Attack("empty", b"", Code.HEADER_LENGTH),
    Attack("seven bytes", b"\x02" + bytes(6), Code.HEADER_LENGTH),
    Attack("length only", (2).to_bytes(8, "little"), Code.HEADER_LENGTH),
    Attack("length 0", bytes(8) + b"{}", Code.HEADER_LENGTH),
    Attack("length 1", (1).to_bytes(8, "little") + b"{}", Code.HEADER_LENGTH),
    Attack("length beyond the file", (9).to_bytes(8, "little") + b"{}", Code.HEADER_LENGTH),
    Attack("length over the cap", (200 << 20).to_bytes(8, "little") + b"{}", Code.HEADER_LENGTH),
    Attack("length 2^64-1", b"\xff" * 8 + b"{}", Code.HEADER_LENGTH),
    Attack("length big-endian", (2).to_bytes(8, "big") + b"{}", Code.HEADER_LENGTH),
    Attack("zip instead", b"PK\x03\x04\x14\x00\x08\x00" + bytes(60), Code.HEADER_LENGTH),
    Attack("html instead", b"<html><body>login</body></html>", Code.HEADER_LENGTH),
    Attack("list", raw("[]"), Code.HEADER_JSON),
    Attack("null", raw("null"), Code.HEADER_JSON),
    Attack("leading space", raw(" {}"), Code.HEADER_JSON),
    Attack("leading newline", raw("\n{}"), Code.HEADER_JSON),
    Attack("byte order mark", raw(b"\xef\xbb\xbf{}"), Code.HEADER_JSON),
    Attack("not closed", raw('{"w":{' + _ENTRY, _DATA), Code.HEADER_JSON),
    Attack("text after", raw("{} x"), Code.HEADER_JSON),
    Attack("second object", raw("{}{}"), Code.HEADER_JSON),
    Attack("nul padding", raw(b"{}" + bytes(6)), Code.HEADER_JSON),
    Attack("trailing comma", raw('{"w":{' + _ENTRY + "},}", _DATA), Code.HEADER_JSON),
    Attack("single quotes", raw("{'w':{}}"), Code.HEADER_JSON),
    Attack("comment", raw("{/**/}"), Code.HEADER_JSON),
    Attack("not utf-8", raw(b'{"\xff":{' + _ENTRY.encode() + b"}}", _DATA), Code.HEADER_JSON),
    Attack("utf-16", raw('{"w":{}}'.encode("utf-16-le")), Code.HEADER_JSON),
    Attack("overlong utf-8", raw(b'{"\xc0\xaf":{' + _ENTRY.encode() + b"}}", _DATA), Code.HEADER_JSON),
    Attack(
        "surrogate in utf-8", raw(b'{"\xed\xa0\x80":{' + _ENTRY.encode() + b"}}", _DATA), Code.HEADER_JSON
    ),
    Attack("lone surrogate", raw('{"\\ud800":{' + _ENTRY + "}}", _DATA), Code.HEADER_JSON),
    Attack("lone low surrogate", raw('{"\\udc00x":{' + _ENTRY + "}}", _DATA), Code.HEADER_JSON),
    Attack("lone surrogate in metadata", _metadata('{"a":"\\ud800"}'), Code.HEADER_JSON),
    Attack("control character", raw('{"a\nb":{' + _ENTRY + "}}", _DATA), Code.HEADER_JSON),
    Attack("bad escape", raw('{"\\x41":{' + _ENTRY + "}}", _DATA), Code.HEADER_JSON),
    Attack("deep nesting", raw('{"w":' + "[" * 100_000 + "]" * 100_000 + "}"), Code.HEADER_JSON),
    Attack("deep objects", raw('{"w":' + '{"a":' * 50_000 + "1" + "}" * 50_000 + "}"), Code.HEADER_JSON),
    Attack("NaN", _shape("[NaN]"), Code.HEADER_JSON),
    Attack("Infinity", _offsets("[0,Infinity]"), Code.HEADER_JSON),
    Attack("-Infinity", _offsets("[-Infinity,4]"), Code.HEADER_JSON),
    Attack("5000 digits", _shape("[" + "9" * 5000 + "]"), Code.HEADER_JSON),
    Attack("leading zero", _shape("[04]"), Code.HEADER_JSON),
    Attack("plus sign", _shape("[+4]"), Code.HEADER_JSON),
    Attack("hexadecimal", _shape("[0x4]"), Code.HEADER_JSON),
    Attack("name twice", raw('{"w":{' + _ENTRY + '},"w":{' + _ENTRY + "}}", _DATA), Code.HEADER_DUPLICATE),
    Attack(
        "name twice, once escaped",
        raw('{"w":{' + _ENTRY + '},"\\u0077":{' + _ENTRY + "}}", _DATA),
        Code.HEADER_DUPLICATE,
    ),
    Attack("field twice", _one('{"dtype":"I8",' + _ENTRY + "}"), Code.HEADER_DUPLICATE),
    Attack("metadata twice", raw('{"__metadata__":{},"__metadata__":{}}'), Code.HEADER_DUPLICATE),
    Attack("metadata key twice", _metadata('{"a":"1","a":"2"}'), Code.HEADER_DUPLICATE),
    Attack("empty name", raw('{"":{' + _ENTRY + "}}", _DATA), Code.HEADER_ENTRY),
    Attack("endless name", raw('{"' + "n" * 2000 + '":{' + _ENTRY + "}}", _DATA), Code.HEADER_ENTRY),
    Attack("entry null", _one("null"), Code.HEADER_ENTRY),
    Attack("entry list", _one('["U8",[4],[0,4]]'), Code.HEADER_ENTRY),
    Attack("entry text", _one('"U8"'), Code.HEADER_ENTRY),
    Attack("entry empty", _one("{}"), Code.HEADER_ENTRY),
    Attack("no dtype", _one('{"shape":[4],"data_offsets":[0,4]}'), Code.HEADER_ENTRY),
    Attack("no shape", _one('{"dtype":"U8","data_offsets":[0,4]}'), Code.HEADER_ENTRY),
    Attack("no offsets", _one('{"dtype":"U8","shape":[4]}'), Code.HEADER_ENTRY),
    Attack("extra field", _one("{" + _ENTRY + ',"x":1}'), Code.HEADER_ENTRY),
    Attack("unknown dtype", entries({"w": entry("F12")}, _DATA), Code.UNKNOWN_DTYPE),
    Attack("lower-case dtype", entries({"w": entry("u8")}, _DATA), Code.UNKNOWN_DTYPE),
    Attack("half-byte dtype", entries({"w": entry("F4", [8])}, _DATA), Code.UNKNOWN_DTYPE),
    Attack("dtype null", _one('{"dtype":null,"shape":[4],"data_offsets":[0,4]}'), Code.UNKNOWN_DTYPE),
    Attack("dtype number", _one('{"dtype":8,"shape":[4],"data_offsets":[0,4]}'), Code.UNKNOWN_DTYPE),
    Attack("dtype list", _one('{"dtype":["U8"],"shape":[4],"data_offsets":[0,4]}'), Code.UNKNOWN_DTYPE),
    Attack("shape null", _shape("null"), Code.HEADER_ENTRY),
    Attack("shape number", _shape("4"), Code.HEADER_ENTRY),
    Attack("shape text", _shape('"4"'), Code.HEADER_ENTRY),
    Attack("shape object", _shape("{}"), Code.HEADER_ENTRY),
    Attack("size text", _shape('["4"]'), Code.HEADER_ENTRY),
    Attack("size fraction", _shape("[4.0]"), Code.HEADER_ENTRY),
    Attack("size exponent", _shape("[4e0]"), Code.HEADER_ENTRY),
    Attack("size true", _one('{"dtype":"U8","shape":[true],"data_offsets":[0,1]}', b"\0"), Code.HEADER_ENTRY),
    Attack("size null", _shape("[null]"), Code.HEADER_ENTRY),
    Attack("size negative", _shape("[-4]"), Code.HEADER_ENTRY),
    Attack(
        "size minus zero", _one('{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}', b""), Code.HEADER_ENTRY
    ),
    Attack("sizes both negative", _shape("[-2,-2]"), Code.HEADER_ENTRY),
    Attack("size 2^63", _shape("[9223372036854775808]"), Code.HEADER_ENTRY),
    Attack("size 2^64+4", _shape("[18446744073709551620]"), Code.HEADER_ENTRY),
    Attack("product overflows to 4", _shape("[4611686018427387905,4]"), Code.HEADER_ENTRY),
    Attack("product overflows to 0", _shape("[4294967296,4294967296]"), Code.HEADER_ENTRY),
    Attack(
        "product overflows before a 0",
        _one('{"dtype":"U8","shape":[9223372036854775807,4,0],"data_offsets":[0,0]}', b""),
        Code.HEADER_ENTRY,
    ),
    Attack("bytes overflow", entries({"w": entry("F64", [2**62])}, _DATA), Code.HEADER_ENTRY),
    Attack(
        "rank 65",
        _one('{"dtype":"U8","shape":[' + "1," * 64 + '1],"data_offsets":[0,1]}', b"\0"),
        Code.HEADER_ENTRY,
    ),
    Attack("offsets null", _offsets("null"), Code.HEADER_ENTRY),
    Attack("offsets one", _offsets("[4]"), Code.HEADER_ENTRY),
    Attack("offsets three", _offsets("[0,4,4]"), Code.HEADER_ENTRY),
    Attack("offsets object", _offsets('{"0":0,"1":4}'), Code.HEADER_ENTRY),
    Attack("offset text", _offsets('["0",4]'), Code.HEADER_ENTRY),
    Attack("offset fraction", _offsets("[0.0,4]"), Code.HEADER_ENTRY),
    Attack("offset false", _offsets("[false,4]"), Code.HEADER_ENTRY),
    Attack("offset minus zero", _offsets("[-0,4]"), Code.HEADER_ENTRY),
    Attack("offset negative", _offsets("[-4,0]"), Code.HEADER_ENTRY),
    Attack("offsets reversed", _offsets("[4,0]"), Code.HEADER_ENTRY),
    Attack("offset 2^64", _offsets("[0,18446744073709551616]"), Code.HEADER_ENTRY),
    Attack("offset 2^64-1", _offsets("[18446744073709551611,18446744073709551615]"), Code.HEADER_ENTRY),
    Attack("shape too small", entries({"w": entry(shape=[3])}, _DATA), Code.HEADER_ENTRY),
    Attack("shape too large", entries({"w": entry(shape=[5])}, _DATA), Code.HEADER_ENTRY),
    Attack("I32 [2,2] in 4 bytes", entries({"w": entry("I32", [2, 2])}, _DATA), Code.HEADER_ENTRY),
    Attack("scalar of 4 bytes as U8", entries({"w": entry(shape=[])}, _DATA), Code.HEADER_ENTRY),
    Attack("no element, but bytes", entries({"w": entry(shape=[0])}, _DATA), Code.HEADER_ENTRY),
    Attack("hole at the start", entries({"w": entry(offsets=[4, 8])}, bytes(8)), Code.HEADER_OFFSETS),
    Attack("hole in between", _pair((0, 4), (8, 12), 12), Code.HEADER_OFFSETS),
    Attack("overlap", _pair((0, 4), (2, 6), 6), Code.HEADER_OFFSETS),
    Attack("alias", _pair((0, 4), (0, 4), 4), Code.HEADER_OFFSETS),
    Attack("inside another", _pair((0, 8), (2, 4), 8), Code.HEADER_OFFSETS),
    Attack("empty one inside another", _pair((0, 4), (2, 2), 4), Code.HEADER_OFFSETS),
    Attack("empty one beyond the end", _pair((0, 4), (8, 8), 4), Code.HEADER_OFFSETS),
    Attack("one byte short", _GOOD[:-1], Code.HEADER_OFFSETS),
    Attack("no data at all", _GOOD[:-4], Code.HEADER_OFFSETS),
    Attack("one byte too many", _GOOD + b"\0", Code.HEADER_OFFSETS),
    Attack("another file behind", _GOOD + _GOOD, Code.HEADER_OFFSETS),
    Attack("data without a tensor", raw("{}", _DATA), Code.HEADER_OFFSETS),
    Attack(
        "terabytes announced", entries({"w": entry(shape=[2**40], offsets=[0, 2**40])}), Code.HEADER_OFFSETS
    ),
    Attack("metadata null", _metadata("null"), Code.HEADER_METADATA),
    Attack("metadata list", _metadata("[]"), Code.HEADER_METADATA),
    Attack("metadata text", _metadata('"a"'), Code.HEADER_METADATA),
    Attack("metadata number", _metadata('{"a":1}'), Code.HEADER_METADATA),
    Attack("metadata nested", _metadata('{"a":{"b":"c"}}'), Code.HEADER_METADATA),
    Attack("metadata value null", _metadata('{"a":null}'), Code.HEADER_METADATA),
)
