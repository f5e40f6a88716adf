"""The schema tells the truth about what the routes take and answer."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from app.bodies import JsonRoute, UploadRoute
from app.main import create_app
from app.settings import Settings
from schemas.events import Event
from schemas.problems import Code
from tests.fakes.admin import OCTETS, code, expert_body, running

Json = dict[str, Any]
Operations = list[tuple[APIRoute, str, Json]]
PROBLEM = "application/problem+json"
COMMITS = {"commit_transaction", "rollback", "reload", "put_expert_now", "post_patches_now"}


@pytest.fixture(scope="module")
def app() -> FastAPI:
    """An app that is never started."""
    return create_app(Settings())


@pytest.fixture
def schema(app: FastAPI) -> Json:
    """Its document."""
    return app.openapi()


@pytest.fixture
def operations(app: FastAPI, schema: Json) -> Operations:
    """Every route with what the document says about it."""
    return [
        (route, method, schema["paths"][route.path_format][method.lower()])
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods)
    ]


def test_every_route_is_there_once(schema: Json, operations: Operations) -> None:
    """Routes and document name the same operations, with ids of their own."""
    found = operations
    listed = [(path, method) for path, item in schema["paths"].items() for method in item]
    assert len(found) == len(listed) >= 27
    ids = [operation["operationId"] for _, _, operation in found]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z_]+", one) for one in ids)


def test_the_contracts_paths_are_literal(schema: Json) -> None:
    """Every path of the contract that this version has."""
    expected = {
        "/health/live",
        "/health/ready",
        "/v1/status",
        "/metrics",
        "/v1/model",
        "/v1/model/experts",
        "/v1/model/tensors",
        "/v1/events",
        "/v1/transactions",
        "/v1/transactions/{id}",
        "/v1/transactions/{id}/experts/{layer}/{expert}",
        "/v1/transactions/{id}/patches",
        "/v1/transactions/{id}/prepare",
        "/v1/transactions/{id}/commit",
        "/v1/experts/{layer}/{expert}",
        "/v1/patches",
        "/v1/tensors/{name}",
        "/v1/versions",
        "/v1/versions/{n}",
        "/v1/versions/current",
        "/v1/rollback",
        "/v1/reload",
        "/v1/baselines/{name}",
        "/v1/digests",
        "/v1/versions/{n}/export",
        "/v1/operations/{id}",
    }
    assert expected <= set(schema["paths"])


def test_uploads_have_a_binary_body_of_both_types(schema: Json, operations: Operations) -> None:
    """Generators must find a body argument that is bytes."""
    uploads = [operation for route, _, operation in operations if isinstance(route, UploadRoute)]
    assert len(uploads) == 4
    for operation in uploads:
        body = operation["requestBody"]
        assert body["required"] is True
        assert set(body["content"]) == {"application/octet-stream", "application/vnd.safetensors"}
        for content in body["content"].values():
            assert content["schema"] == {"type": "string", "format": "binary"}


def test_read_backs_answer_binary_with_an_etag(schema: Json) -> None:
    """What comes back is a file of one version."""
    for path in ("/v1/experts/{layer}/{expert}", "/v1/tensors/{name}"):
        answer = schema["paths"][path]["get"]["responses"]["200"]
        assert answer["content"] == {
            "application/vnd.safetensors": {"schema": {"type": "string", "format": "binary"}}
        }
        assert "ETag" in answer["headers"]


def test_headers_are_named(schema: Json, operations: Operations) -> None:
    """Request headers where they are read, answer headers where they are set."""
    for route, method, operation in operations:
        names = {one["name"] for one in operation.get("parameters", []) if one["in"] == "header"}
        changes = method in ("POST", "PUT")
        assert ("Idempotency-Key" in names) == changes, route.path
        commits = route.name in (
            "commit_transaction",
            "rollback",
            "reload",
            "put_expert_now",
            "post_patches_now",
        )
        assert ("If-Match" in names) == commits, route.path
        assert ("Content-Digest" in names) == isinstance(route, UploadRoute), route.path
        if commits:
            assert "ETag" in operation["responses"]["200"]["headers"]
    created = schema["paths"]["/v1/transactions"]["post"]["responses"]
    assert "Location" in created["201"]["headers"]
    assert "200" not in created
    begun = schema["paths"]["/v1/versions/{n}/export"]["post"]["responses"]
    assert "Location" in begun["202"]["headers"]
    busy = schema["paths"]["/v1/rollback"]["post"]["responses"]["409"]
    assert "Retry-After" in busy["headers"]


KEYS = ("k", "a b", "~" * 255, "", "k" * 256, "ö", "a\tb")
TAGS = ('"0"', "*", ' "0" , W/"1"', '"0"', "0", '"0" "1"', '"0', "")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Idempotency-Key", KEYS),
        ("If-Match", TAGS),
        ("Content-Digest", (f"sha-256=:{'A' * 43}=:", "md5=:AAAA:", "a=::;b=1, c=::", "md5=AAAA", "md5")),
    ],
)
async def test_headers_have_the_form_that_is_asked_for(
    tmp_path: Path, schema: Json, name: str, values: tuple[str, ...]
) -> None:
    """What a header's schema refuses, the service refuses as malformed, and nothing else of it."""
    parameters = schema["paths"]["/v1/patches"]["post"]["parameters"]
    asked = next(one for one in parameters if one["name"] == name)["schema"]
    async with running(tmp_path) as admin:
        for value in values:
            headers = {**OCTETS, name: value.encode()}
            answer = await admin.http.post("/v1/patches", content=b"x", headers=headers)
            fits = re.search(asked["pattern"], value) is not None
            fits = fits and asked.get("minLength", 0) <= len(value) <= asked.get("maxLength", len(value))
            refused = code(answer) == "bad_request" and name in answer.json()["detail"]
            assert refused == (not fits), value


def test_every_error_is_a_problem_with_its_codes(schema: Json, operations: Operations) -> None:
    """No other error format is promised, and every code of the table that is named is a real one."""
    for route, _, operation in operations:
        errors = {status: one for status, one in operation["responses"].items() if int(status) >= 400}
        assert {"401", "403", "421", "500"} <= set(errors), route.path
        for answer in errors.values():
            assert set(answer["content"]) == {PROBLEM}
            assert answer["content"][PROBLEM]["schema"] == {"$ref": "#/components/schemas/Problem"}
            assert {Code(one) for one in answer["content"][PROBLEM]["examples"]}
        if isinstance(route, JsonRoute) and "POST" in route.methods:
            assert {"400", "408", "413", "415", "422"} <= set(errors), route.path


def test_references_lead_somewhere(schema: Json) -> None:
    """Every $ref has its target, and nothing of FastAPI's own errors is left."""
    references = set(re.findall(r"'#/components/schemas/(\w+)'", repr(schema)))
    assert references <= set(schema["components"]["schemas"])
    assert "HTTPValidationError" not in schema["components"]["schemas"]


@pytest.mark.anyio
async def test_what_is_answered_is_what_was_promised(tmp_path: Path) -> None:
    """Refusals of every kind are listed under their route, status and code."""
    async with running(tmp_path) as admin:
        schema = (await admin.http.get("/openapi.json")).json()
        paths = schema["paths"]
        opened = await admin.open()
        requests: list[tuple[str, str, str, Json]] = [
            ("post", "/v1/transactions", "/v1/transactions", {"json": {"in_flight": "later"}}),
            ("post", "/v1/transactions", "/v1/transactions", {"json": {"base_version": 3}}),
            ("get", "/v1/transactions/{id}", "/v1/transactions/x", {}),
            ("post", "/v1/transactions/{id}/commit", f"{opened}/commit", {}),
            ("post", "/v1/transactions/{id}/commit", f"{opened}/commit", {"content": b"x"}),
            ("put", "/v1/experts/{layer}/{expert}", "/v1/experts/9/9", {"content": b"x", "headers": OCTETS}),
            ("put", "/v1/experts/{layer}/{expert}", "/v1/experts/0/0", {"content": b"x", "headers": OCTETS}),
            ("put", "/v1/experts/{layer}/{expert}", "/v1/experts/0/0", {"content": expert_body()}),
            ("post", "/v1/patches", "/v1/patches", {"content": expert_body(), "headers": OCTETS}),
            ("post", "/v1/rollback", "/v1/rollback", {"json": {"to_version": 3}}),
            ("post", "/v1/reload", "/v1/reload", {}),
            ("post", "/v1/versions/{n}/export", "/v1/versions/5/export", {"json": {"path": "/x"}}),
            ("post", "/v1/versions/{n}/export", "/v1/versions/0/export", {"json": {"path": "/x"}}),
            ("post", "/v1/versions/{n}/export", "/v1/versions/0/export", {}),
            ("get", "/v1/operations/{id}", "/v1/operations/x", {}),
            ("delete", "/v1/operations/{id}", "/v1/operations/x", {}),
            ("post", "/v1/reload", "/v1/reload", {"json": {"path": "no"}}),
            ("get", "/v1/versions/{n}", "/v1/versions/x", {}),
            ("get", "/v1/versions/{n}", "/v1/versions/5", {}),
            ("get", "/v1/baselines/{name}", "/v1/baselines/x", {}),
            ("get", "/v1/tensors/{name}", "/v1/tensors/x", {}),
            ("get", "/v1/model/tensors", "/v1/model/tensors?limit=0", {}),
            ("delete", "/v1/transactions/{id}", opened, {"content": b"x"}),
        ]
        for method, template, path, request in requests:
            answer = await admin.http.request(method.upper(), path, **request)
            promised = paths[template][method]["responses"].get(str(answer.status_code))
            assert promised, (method, path, answer.text)
            assert code(answer) in promised["content"][PROBLEM]["examples"], (method, path)


def test_every_event_has_a_time(schema: Json) -> None:
    """Readers can count on it, in the models as in the example of a stream."""
    for reference in schema["components"]["schemas"]["Event"]["oneOf"]:
        model = schema["components"]["schemas"][reference["$ref"].rpartition("/")[2]]
        assert "at" in model["required"]
        assert (model["properties"]["at"]["type"], model["properties"]["at"]["format"]) == (
            "string",
            "date-time",
        )
    stream = schema["paths"]["/v1/events"]["get"]["responses"]["200"]["content"]["text/event-stream"]
    data = stream["example"].partition("data: ")[2]
    adapter: TypeAdapter[Event] = TypeAdapter(Event)
    assert adapter.dump_python(adapter.validate_json(data), mode="json") == json.loads(data)
