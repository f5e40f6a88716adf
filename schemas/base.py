"""What all wire models share: strict input, open output, and how versions are written."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema


class Input(BaseModel):
    """A body that a client sends: unknown fields are refused, and errors do not repeat what was sent."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )


class Output(BaseModel):
    """A body that Graft answers with: clients must tolerate new fields."""

    model_config = ConfigDict(
        frozen=True, use_attribute_docstrings=True, json_schema_serialization_defaults_required=True
    )


def _parse_version(value: object) -> object:
    """Accept `7` and `"7"`; leave everything else for pydantic to refuse."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 18:
        return int(value)
    return value


_TEXT = {"type": "string", "pattern": "^[0-9]{1,18}$"}
_NUMBER = {"type": "integer", "minimum": 0, "exclusiveMaximum": 10**18}

Version = Annotated[
    int,
    BeforeValidator(_parse_version),
    Field(strict=True, ge=0, lt=10**18),
    PlainSerializer(str, return_type=str, when_used="json"),
    WithJsonSchema(_TEXT, mode="serialization"),
    WithJsonSchema({"anyOf": [_TEXT, _NUMBER]}, mode="validation"),
]
"""A weight version: decimal, only grows; a string in output, string or number in input."""


def _plain_number(value: object) -> object:
    """Only digits, with a sign if negative: `1.0`, `+1` and `1_0` name nothing."""
    if isinstance(value, str) and not (value.isascii() and value.removeprefix("-").isdigit()):
        raise ValueError("not a number")
    return value


Ordinal = Annotated[int, BeforeValidator(_plain_number)]
"""A layer's or an expert's number in a path."""

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""A BLAKE3 digest, 64 lower-case hex digits."""
