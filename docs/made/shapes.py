"""JSON schemas in words."""

import json
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

REFERENCE = "#/components/schemas/"
BOUNDS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
    "ge": "≥",
    "lt": "<",
    "maxLength": "no longer than",
    "pattern": "matching",
}


def title(name: str) -> str:
    """What the section of a shape is called."""
    return f"`{name}`"


def anchor(name: str) -> str:
    """Where it is."""
    return f"shape-{name.lower()}"


def type_of(schema: Json) -> str:
    """A type in words, with links to shapes."""
    if reference := schema.get("$ref"):
        name = reference.removeprefix(REFERENCE)
        return f"[{title(name)}](#{anchor(name)})"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(type_of(one) for one in schema[several]))
    if "allOf" in schema:
        return " and ".join(type_of(one) for one in schema["allOf"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    return _plain(schema)


def _plain(schema: Json) -> str:
    kind = schema.get("type", "any JSON")
    if kind == "array":
        if "prefixItems" in schema:
            return "array of " + ", ".join(type_of(one) for one in schema["prefixItems"])
        return f"array of {type_of(schema.get('items', {}))}"
    if kind == "object" and isinstance(inner := schema.get("additionalProperties"), dict):
        return f"object of {type_of(inner)}"
    if schema.get("format") == "binary":
        return "bytes"
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    bounds = [f"{word} `{schema[name]}`" for name, word in BOUNDS.items() if name in schema]
    return f"{kind} {', '.join(bounds)}".strip()


def fields(schema: Json) -> Iterator[list[str]]:
    """Name, type and meaning of each member of an object."""
    required = schema.get("required", ())
    for name, member in schema["properties"].items():
        text = member.get("description", "")
        if name not in required and member.get("default") is not None:
            text = f"{text} Default `{json.dumps(member['default'])}`.".strip()
        yield [f"`{name}`" + ("" if name in required else " (may be left out)"), type_of(member), text]
