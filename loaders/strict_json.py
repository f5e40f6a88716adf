"""JSON without JSON's traps: no key twice, no NaN, no lone surrogates, no endless numbers."""

import json
from typing import Any, NoReturn

MAX_DIGITS = 20
"""Digits of an integer; every 64-bit number has at most 20."""


class DuplicateKey(ValueError):
    """An object names a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__("a key stands twice in one object")
        self.key = key


def loads(text: str) -> object:
    """Parse `text`.

    Raises `DuplicateKey`, or `ValueError` with a text that holds nothing of the input.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; keys and texts in it must be encodable, or no answer could name them."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise DuplicateKey(_first_twice(pairs))
    for key, value in pairs:
        if not key.isascii():
            _check_surrogates(key)
        if isinstance(value, str) and not value.isascii():
            _check_surrogates(value)
    return found


def _first_twice(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            break
        seen.add(key)
    return key.encode(errors="replace").decode()


def _check_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a string holds half of a surrogate pair") from None


def _integer(digits: str) -> int | float:
    """An integer; `-0` is none in stricter readers, so it becomes a float here too."""
    if len(digits) > MAX_DIGITS:
        raise ValueError("a number has too many digits")
    return -0.0 if digits == "-0" else int(digits)


def _no_constant(_name: str) -> NoReturn:
    raise ValueError("NaN and infinities are not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_integer, parse_constant=_no_constant)
