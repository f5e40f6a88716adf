"""What a request says about its body before it comes: type, encoding, length, digest."""

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers

from schemas.problems import Code, ProblemError

CONTENT_TYPES = ("application/octet-stream", "application/vnd.safetensors")
"""Media types of uploads; the first is the one that texts recommend."""
DIGESTS = {"sha-256": "sha256", "sha-512": "sha512"}
"""`Content-Digest` algorithm → name in hashlib. Others are ignored, as RFC 9530 allows."""

DIGEST_MEMBER = re.compile(r"([a-z*][a-z0-9_.*-]*)=:([A-Za-z0-9+/=]*):(?:;[^,]*)?")


@dataclass(frozen=True)
class Announced:
    """A body as its headers describe it."""

    nbytes: int | None
    """Content-Length; none for a chunked body."""
    digests: Mapping[str, bytes]
    """hashlib name → digest that the body must have."""


def check_announced(headers: Headers, limit: int) -> Announced:
    """All that can be refused before a byte of the body is read. `limit` is in bytes.

    Raises `content_encoding`, `content_type`, `bad_request`, `body_empty`, `body_too_large`.
    """
    _check_encoding(headers)
    _check_type(headers)
    if "content-range" in headers:
        raise ProblemError(Code.BAD_REQUEST, "Uploads come in one piece: Content-Range is not accepted.")
    nbytes = _length(headers)
    if nbytes == 0:
        raise body_empty()
    if nbytes is not None and nbytes > limit:
        raise body_too_large(limit, nbytes)
    return Announced(nbytes, _digests(headers))


def body_empty() -> ProblemError:
    """The refusal of a request without a body."""
    return ProblemError(Code.BODY_EMPTY, f"Send a safetensors file as the body: {_how()}.")


def body_too_large(limit: int, least: int) -> ProblemError:
    """The refusal of a body over the limit, of which `least` bytes are announced or implied."""
    return ProblemError(
        Code.BODY_TOO_LARGE,
        f"A body may have at most {limit} bytes; this one has at least {least}.",
        limit=limit,
    )


def _check_encoding(headers: Headers) -> None:
    codings = [
        coding.strip().lower() for value in headers.getlist("content-encoding") for coding in value.split(",")
    ]
    if any(coding not in ("identity", "") for coding in codings):
        raise ProblemError(
            Code.CONTENT_ENCODING,
            "Send the file as it is, without Content-Encoding: weights do not compress.",
        )


def _check_type(headers: Headers) -> None:
    types = [value.partition(";")[0].strip().lower() for value in headers.getlist("content-type")]
    if len(types) != 1 or types[0] not in CONTENT_TYPES:
        raise ProblemError(
            Code.CONTENT_TYPE,
            f"The content type must be {' or '.join(CONTENT_TYPES)}. With curl: {_how()}.",
            accepted=list(CONTENT_TYPES),
        )


def _how() -> str:
    return (
        f"--data-binary @FILE -H 'Content-Type: {CONTENT_TYPES[0]}' (not -d, which drops bytes, and not -F)"
    )


def _length(headers: Headers) -> int | None:
    values = headers.getlist("content-length")
    if not values:
        return None
    if len(values) > 1 or not values[0].isascii() or not values[0].isdigit() or len(values[0]) > 19:
        raise ProblemError(Code.BAD_REQUEST, "Content-Length is not a number of bytes.")
    return int(values[0])


def _digests(headers: Headers) -> dict[str, bytes]:
    """The digests of `Content-Digest` (RFC 9530) that Graft knows how to check."""
    found = {}
    for value in headers.getlist("content-digest"):
        for member in value.split(","):
            matched = DIGEST_MEMBER.fullmatch(member.strip())
            if matched is None:
                raise _bad_digest()
            name, encoded = matched.groups()
            if name in DIGESTS:
                found[DIGESTS[name]] = _decode_digest(DIGESTS[name], encoded)
    return found


def _decode_digest(algorithm: str, encoded: str) -> bytes:
    try:
        digest = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raise _bad_digest() from None
    if len(digest) != hashlib.new(algorithm).digest_size:
        raise _bad_digest()
    return digest


def _bad_digest() -> ProblemError:
    return ProblemError(
        Code.BAD_REQUEST, "Content-Digest must look like sha-256=:BASE64:, with the digest of the whole body."
    )
