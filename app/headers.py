"""Request and answer headers as /openapi.json describes them."""

from typing import Any

from app.announced import DIGEST_MEMBER
from app.idempotency import LONGEST
from app.preconditions import PATTERN

Json = dict[str, Any]

_DIGEST = DIGEST_MEMBER.pattern


def _header(name: str, description: str, example: str, **schema: object) -> Json:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": description,
        "schema": {"type": "string", **schema},
        "example": example,
    }


IDEMPOTENCY_KEY = _header(
    "Idempotency-Key",
    "The same key and request again gets the first answer.",
    "step-1200",
    minLength=1,
    maxLength=LONGEST,
    pattern="^[ -~]+$",
)
IF_MATCH = _header(
    "If-Match", 'Go on only if this is the current version, for example `"7"`.', '"7"', pattern=PATTERN
)
PREFER = _header(
    "Prefer",
    "`respond-async`: answer 202 with an operation to follow, and go on. Other preferences are ignored.",
    "respond-async",
    minLength=1,
    pattern="^[\\t -~]+$",
)
LAST_EVENT_ID = _header(
    "Last-Event-ID", "Go on after this event; without it, or if it is gone, with `reset`.", "5b1f0c9e-17"
)
CONTENT_DIGEST = _header(
    "Content-Digest",
    "Checked if sent (RFC 9530), with sha-256 or sha-512; other algorithms are ignored.",
    "sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:",
    pattern=rf"^\s*{_DIGEST}(\s*,\s*{_DIGEST})*\s*$",
)

ETAG = {"description": "The version, in quotes.", "schema": {"type": "string", "pattern": '^"[0-9]+"$'}}
LOCATION = {"description": "Where the new thing is.", "schema": {"type": "string", "format": "uri-reference"}}
RETRY_AFTER = {
    "description": "Seconds to wait before asking again.",
    "schema": {"type": "integer", "minimum": 0},
}
