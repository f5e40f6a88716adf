"""The page of the API, from the service's own OpenAPI document."""

import json
from collections.abc import Iterator
from typing import Any

from app.main import create_app
from docs.made.shapes import anchor, fields, title, type_of
from docs.made.tables import table

Json = dict[str, Any]

INTRODUCTION = """# API

Made from `/openapi.json`, which a running service answers with; generators of clients take that. Bodies
are JSON unless said otherwise. Ids and versions are strings in answers; versions are taken as strings or
numbers.

Every route can answer with the problems {everywhere}; they are not repeated below. [Errors](errors.md)
says what each code means.

"""
PROBLEM = "application/problem+json"
FASTAPIS_OWN = "Successful Response"
"""What it says of answers that nobody has described."""
EVERYWHERE = ("unauthorized", "bad_host", "bad_origin", "internal")


def page() -> str:
    """A section for each operation, in the order of the routes, then one for each shape of JSON."""
    document = create_app().openapi()
    parts = [INTRODUCTION.format(everywhere=", ".join(f"`{code}`" for code in EVERYWHERE))]
    for path, methods in document["paths"].items():
        parts += [_operation(method.upper(), path, operation) for method, operation in methods.items()]
    parts.append("# Shapes\n")
    parts += [_shape(name, schema) for name, schema in sorted(document["components"]["schemas"].items())]
    return "\n".join(parts)


def _operation(method: str, path: str, operation: Json) -> str:
    parts = [f"## {method} {path}\n"]
    if text := operation.get("description"):
        parts.append(text + "\n")
    parts.append(f"Operation id `{operation['operationId']}`.\n")
    if parameters := operation.get("parameters"):
        rows = ([f"`{p['name']}`", p["in"], type_of(p["schema"]), _meaning(p)] for p in parameters)
        parts.append(table(["parameter", "in", "type", "meaning"], rows))
    if body := operation.get("requestBody"):
        parts.append(_body(body))
    parts.append(table(["status", "answer", "body"], _answers(operation["responses"])))
    parts.append(_problems(operation["responses"]))
    return "\n".join(parts)


def _meaning(parameter: Json) -> str:
    schema = parameter["schema"]
    text = parameter.get("description") or schema.get("description") or ""
    if parameter["required"]:
        return text or "Required."
    if schema.get("default") is not None:
        return f"{text} Default `{json.dumps(schema['default'])}`.".strip()
    return text


def _body(body: Json) -> str:
    kinds = " or ".join(f"`{kind}`" for kind in body["content"])
    shapes = {type_of(content["schema"]) for content in body["content"].values()}
    text = f"**Body**: {kinds}: {', '.join(sorted(shapes))}."
    return f"{text} {body.get('description', '')}".strip() + "\n"


def _answers(responses: Json) -> Iterator[list[str]]:
    for status, response in responses.items():
        content = response.get("content", {})
        if PROBLEM in content:
            continue
        headers = "".join(f" `{name}`: {header['description']}" for name, header in _headers(response))
        bodies = (f"`{kind}`: {type_of(body.get('schema', {}))}" for kind, body in content.items())
        said = response["description"].replace(FASTAPIS_OWN, "")
        yield [status, said + headers, ", ".join(bodies)]


def _headers(response: Json) -> Iterator[tuple[str, Json]]:
    yield from response.get("headers", {}).items()


def _problems(responses: Json) -> str:
    rows = []
    for status, response in responses.items():
        if PROBLEM not in response.get("content", {}):
            continue
        codes = response["content"][PROBLEM]["examples"]
        named = ", ".join(f"`{code}`" for code in codes if code not in EVERYWHERE)
        if named:
            rows.append([status, named])
    return table(["status", "codes of problems"], rows) if rows else ""


def _shape(name: str, schema: Json) -> str:
    parts = [f"## {title(name)} {{: #{anchor(name)} }}\n"]
    if text := schema.get("description"):
        parts.append(text + "\n")
    if "enum" in schema:
        parts.append("One of " + ", ".join(f"`{value}`" for value in schema["enum"]) + ".\n")
    elif schema.get("properties"):
        parts.append(table(["member", "type", "meaning"], fields(schema)))
    elif "type" in schema:
        parts.append(f"{type_of(schema)}\n")
    return "\n".join(parts)
