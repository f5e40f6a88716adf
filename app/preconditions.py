"""What a client expects the current version to be."""

import re
from dataclasses import dataclass

from schemas.problems import Code, ProblemError

_TAG = re.compile(r'(W/)?"([\x21\x23-\x7e]*)"')
_TAGS = rf"{_TAG.pattern}(\s*,\s*{_TAG.pattern})*"
_LIST = re.compile(rf"\s*{_TAGS}\s*")
PATTERN = rf"^\s*(\*|{_TAGS})\s*$"
"""What If-Match takes, as a regular expression of the OpenAPI document."""


def etag(version: int) -> str:
    """The entity tag of a version."""
    return f'"{version}"'


@dataclass(frozen=True)
class Precondition:
    """The strong tags of an If-Match header; `tags` is none if every version will do."""

    tags: frozenset[str] | None = None

    def check(self, current: int) -> None:
        """Raises precondition_failed if the current version is not among the tags."""
        if self.tags is not None and str(current) not in self.tags:
            raise ProblemError(
                Code.PRECONDITION_FAILED, "The current version is another one.", current=str(current)
            )


def parse_if_match(header: str | None) -> Precondition:
    """The precondition in an If-Match header; weak tags never match. Raises bad_request."""
    if header is None or header.strip() == "*":
        return Precondition()
    if not _LIST.fullmatch(header):
        raise ProblemError(Code.BAD_REQUEST, 'If-Match takes quoted versions, for example "7", or *.')
    return Precondition(frozenset(tag for weak, tag in _TAG.findall(header) if not weak))


def check_base(expected: int | None, current: int) -> None:
    """Raises version_moved if `expected` is given and not the current version."""
    if expected is not None and expected != current:
        detail = f"base_version is {expected}, but the current version is {current}."
        raise ProblemError(Code.VERSION_MOVED, detail, current=str(current))
