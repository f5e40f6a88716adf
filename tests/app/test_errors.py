"""Bad requests: always a 4xx problem document with a stable code, never with the client's bytes in it."""

import json
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute

from app.bodies import UploadRoute
from schemas.problems import STATUS, Code
from tests.fakes.admin import Admin, code, running

pytestmark = pytest.mark.anyio

GARBAGE = b"\x80\x81\x82\xff"
SECRET = "never-say-this"
TYPES = [
    None,
    "application/json",
    "application/json; charset=latin-1",
    "application/octet-stream",
    "application/vnd.safetensors",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "text/plain",
    "nonsense",
]
JSON_BODIES = [
    GARBAGE,
    b"",
    b"NaN",
    b"null",
    b"[]",
    b'"x"',
    b"7",
    b"{",
    b'{"label": NaN}',
    b'{"expires_in_s": Infinity}',
    b'{"expires_in_s": 1e999}',
    b'{"label": "\\ud800"}',
    b'{"\\ud800": 1}',
    b'{"label": "a", "label": "b"}',
    b'{"to_version": 0, "to_version": 1}',
    b'{"base_version": ' + b"9" * 5000 + b"}",
    b'{"to_version": ' + b"9" * 30 + b"}",
    b'{"version": {"a": []}}',
    b"[" * 60_000,
    b'{"a":' * 10_000,
    b'{"label": "' + SECRET.encode() + b'", "<' + SECRET.encode() + b'>": 1}',
    b'{"in_flight": "' + SECRET.encode() + b'", "to_version": "' + SECRET.encode() + b'"}',
    b"\xef\xbb\xbf{}",
    "{}".encode("utf-16"),
    b"{}" + b" " * 70_000,
]


def requests(admin: Admin) -> list[tuple[str, str, bool]]:
    """Method, path and whether it takes an upload, for every route."""
    found = []
    for route in admin.app.routes:
        if isinstance(route, APIRoute):
            path = route.path_format.format(id="none", layer=0, expert=0, name="model.norm.weight", n=0)
            found += [(method, path, isinstance(route, UploadRoute)) for method in sorted(route.methods)]
    return found


async def test_garbage_to_every_route_is_never_a_5xx(tmp_path: Path) -> None:
    """Four bytes that are not UTF-8, with every content type: 4xx wherever a body means something."""
    async with running(tmp_path) as admin:
        admin.service.feed.close()  # so that the stream of events ends
        assert len(requests(admin)) >= 25
        for method, path, _ in requests(admin):
            for kind in TYPES:
                headers = {} if kind is None else {"content-type": kind}
                answer = await admin.http.request(method, path, content=GARBAGE, headers=headers)
                assert answer.status_code < 500, (method, path, kind)
                if method != "GET":
                    assert code(answer), (method, path, kind)
        assert admin.files == []
        assert await admin.version() == "0"
        assert not admin.service.transactions.all()


async def test_bad_json_is_never_a_5xx(tmp_path: Path) -> None:
    """JSON of every wrong kind to every route that takes some: an answer below 500 that doesn't repeat it."""
    async with running(tmp_path) as admin:
        headers = {"content-type": "application/json"}
        routes = [
            (method, path) for method, path, upload in requests(admin) if method != "GET" and not upload
        ]
        assert len(routes) >= 7
        for content in JSON_BODIES:
            for method, path in routes:
                answer = await admin.http.request(method, path, content=content, headers=headers)
                case = (method, path, content[:30])
                assert answer.status_code < 500, case
                assert answer.is_error or content in (b"", b"null"), case
                assert not answer.is_error or code(answer), case
                assert SECRET not in answer.text, case


@pytest.mark.parametrize(
    ("content", "kind", "expected"),
    [
        (GARBAGE, None, "content_type"),
        (GARBAGE, "application/octet-stream", "content_type"),
        (GARBAGE, "application/json", "bad_json"),
        (b'{"label": NaN}', "application/json", "bad_json"),
        (b'{"label": "a", "label": "b"}', "application/json", "bad_json"),
        (b"[" * 60_000, "application/json", "bad_json"),
        (b"{}" + b" " * 70_000, "application/json", "body_too_large"),
        (b'{"label": "\\ud800"}', "application/json", "bad_value"),
        (b'{"label": 7}', "Application/JSON; charset=utf-8", "bad_value"),
    ],
)
async def test_json_refusals_have_their_code(
    tmp_path: Path, content: bytes, kind: str | None, expected: str
) -> None:
    """Type first, then size, then syntax, then values."""
    async with running(tmp_path) as admin:
        headers = {} if kind is None else {"content-type": kind}
        answer = await admin.http.post("/v1/transactions", content=content, headers=headers)
        assert code(answer) == expected
        assert answer.status_code == STATUS[Code(expected)][0]


async def test_a_body_where_none_is_taken_is_400(tmp_path: Path) -> None:
    """DELETE says all in its path, and a body that is sent along is not silently dropped."""
    async with running(tmp_path) as admin:
        transaction = await admin.open()
        answer = await admin.http.request("DELETE", transaction, json={})
        assert (answer.status_code, code(answer)) == (400, "bad_request")
        assert (await admin.http.get(transaction)).json()["state"] == "open"


async def test_compressed_json_is_415(tmp_path: Path) -> None:
    """Nothing is decompressed."""
    async with running(tmp_path) as admin:
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        answer = await admin.http.post("/v1/transactions", content=b"{}", headers=headers)
        assert code(answer) == "content_encoding"


async def test_a_chunked_json_body_is_counted(tmp_path: Path) -> None:
    """Without a Content-Length the limit holds too, and small bodies are read."""
    async with running(tmp_path) as admin:
        headers = {"content-type": "application/json"}

        async def chunks(count: int) -> object:
            yield b"{"
            for _ in range(count):
                yield b" " * 1024
            yield b"}"

        small = await admin.http.post("/v1/transactions", content=chunks(3), headers=headers)  # type: ignore[arg-type]
        large = await admin.http.post("/v1/transactions", content=chunks(80), headers=headers)  # type: ignore[arg-type]
        assert small.status_code == 201
        assert code(large) == "body_too_large"


async def test_unknown_paths_are_404(tmp_path: Path) -> None:
    """No redirects, no HTML."""
    async with running(tmp_path) as admin:
        for path in ("/v1", "/v1/", "/v1/transactions/", "/docs", "/v1/nothing", "/%00", "/v1//status"):
            answer = await admin.http.get(path)
            assert (answer.status_code, code(answer)) == (404, "not_found"), path


async def test_wrong_methods_are_405(tmp_path: Path) -> None:
    """The Allow header says what there is."""
    async with running(tmp_path) as admin:
        for path in ("/v1/transactions", "/v1/status", "/v1/rollback", "/v1/transactions/x/commit"):
            answer = await admin.http.patch(path)
            assert (answer.status_code, code(answer)) == (405, "method_not_allowed")
            assert answer.headers["allow"]


async def test_a_bug_is_a_500_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unforeseen exception is a problem document without its text."""
    async with running(tmp_path) as admin:

        def broken() -> object:
            raise RuntimeError(SECRET)

        monkeypatch.setattr(admin.service, "progress", broken)
        answer = await admin.http.get("/v1/status")
        assert (answer.status_code, code(answer)) == (500, "internal")
        assert SECRET not in answer.text


async def test_unknown_names_come_back_with_near_ones(tmp_path: Path) -> None:
    """A tensor that is asked for by a misspelt name is 404 and says what is like it."""
    async with running(tmp_path) as admin:
        answer = await admin.http.get("/v1/tensors/model.norm.wieght")
        assert (answer.status_code, code(answer)) == (404, "unknown_tensor")
        assert "model.norm.weight" in json.dumps(answer.json()["errors"])


async def test_every_code_has_a_status() -> None:
    """The table is complete, and every status in it is an error."""
    assert set(STATUS) == set(Code)
    assert all(400 <= status < 600 and title for status, title in STATUS.values())


async def test_bad_versions_in_the_path(tmp_path: Path) -> None:
    """What is no version is 422; what is one but not there is 404."""
    async with running(tmp_path) as admin:
        for value in ("abc", "1.0", "-1", "9" * 30, "%F0%9F%98%80"):
            assert code(await admin.http.get(f"/v1/versions/{value}")) == "bad_value"
        missing: httpx.Response = await admin.http.get("/v1/versions/77")
        assert (missing.status_code, code(missing)) == (404, "unknown_version")
