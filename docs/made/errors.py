"""The page of errors, from the one table of codes."""

from docs.made.tables import table
from schemas.problems import STATUS

INTRODUCTION = """# Errors

Refusals are `application/problem+json` (RFC 9457): `type`, `title`, `status`, `detail` and a stable
`code`, with more members where a code has more to say, such as `errors` with a place for each, or
`ranks`. `detail` is for people and may change its words; programs look at `code`. Nothing of what was
refused is applied, and no version is used up. Which codes a route can answer with stands
[there](api.md).

"""


def page() -> str:
    """One row per code."""
    rows = ([f"`{code}`", str(status), title] for code, (status, title) in STATUS.items())
    return INTRODUCTION + table(["code", "status", "meaning"], rows)
