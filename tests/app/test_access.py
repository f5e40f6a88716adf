"""Who may ask: token, Host, Origin."""

from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from app.main import create_app
from app.settings import Settings
from app.token import is_loopback, load_token
from tests.fakes.admin import code, running

pytestmark = pytest.mark.anyio


async def test_with_a_token_everything_but_live_needs_it(tmp_path: Path) -> None:
    """Missing or wrong tokens are 401 on every path, known or not; the right one opens them."""
    async with running(tmp_path, token="s3cret") as admin:
        wrong = ["Bearer s3cre", "Bearer s3crets", "Basic s3cret", "s3cret", "Bearer", "Bearer \xe9", ""]
        for value in (None, *wrong):
            headers = [] if value is None else [(b"authorization", value.encode("latin-1"))]
            for path in ("/v1/status", "/health/ready", "/openapi.json", "/metrics", "/none"):
                answer = await admin.http.get(path, headers=headers)
                assert (answer.status_code, code(answer)) == (401, "unauthorized"), (value, path)
                assert answer.headers["www-authenticate"] == "Bearer"
            assert (await admin.http.get("/health/live", headers=headers)).status_code == 200
        for value in ("Bearer s3cret", "bearer s3cret"):
            assert (await admin.http.get("/v1/status", headers={"authorization": value})).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8001", "127.0.0.1.evil.example", "", "[::1", "a b"]
)
async def test_other_hosts_are_refused_on_loopback(tmp_path: Path, host: str) -> None:
    """A web page that points its own name at this machine gets nothing."""
    async with running(tmp_path) as admin:
        answer = await admin.http.get("/v1/status", headers={"host": host})
        assert (answer.status_code, code(answer)) == (421, "bad_host")


async def test_two_hosts_are_none(tmp_path: Path) -> None:
    """A request that names two hosts is refused, even if both are local."""
    async with running(tmp_path) as admin:
        hosts = [(b"host", b"localhost"), (b"host", b"127.0.0.1")]
        assert code(await admin.http.get("/v1/status", headers=hosts)) == "bad_host"


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8001", "localhost", "LOCALHOST:9", "[::1]:8001", "graft.internal"]
)
async def test_loopback_names_and_listed_hosts_are_fine(tmp_path: Path, host: str) -> None:
    """Local names always, others when they are listed."""
    async with running(tmp_path, allowed_hosts=("graft.internal",)) as admin:
        assert (await admin.http.get("/v1/status", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8001", 200),
        ("https://ui.example", 200),
        ("http://127.0.0.1:3000", 403),
        ("https://evil.example", 403),
        ("null", 403),
        ("", 403),
    ],
)
async def test_origins(tmp_path: Path, origin: str, status: int) -> None:
    """Requests that web pages make are refused, unless the page is this service's or a listed one."""
    async with running(tmp_path, allowed_origins=("https://ui.example",)) as admin:
        answer = await admin.http.get("/v1/status", headers={"origin": origin})
        assert answer.status_code == status
        opened = await admin.http.post("/v1/transactions", headers={"origin": origin})
        assert (opened.status_code == 201) == (status == 200)


async def test_bound_elsewhere_any_host_is_fine_with_the_token(tmp_path: Path) -> None:
    """Behind a service name the token guards; a list of hosts narrows it."""
    headers = {"authorization": "Bearer t", "host": "graft:8001"}
    async with running(tmp_path, token="t", host="0.0.0.0") as admin:
        assert (await admin.http.get("/v1/status", headers=headers)).status_code == 200
    async with running(tmp_path, token="t", host="0.0.0.0", allowed_hosts=("other",)) as admin:
        assert code(await admin.http.get("/v1/status", headers=headers)) == "bad_host"


def test_tokens_come_from_variable_or_file(tmp_path: Path) -> None:
    """Space around them does not count; the variable goes before the file."""
    file = tmp_path / "token"
    file.write_text(" from-file\n")
    assert load_token(Settings(token_file=file)) == "from-file"
    assert load_token(Settings(token=SecretStr("direct"), token_file=file)) == "direct"
    assert load_token(Settings()) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.com", ""])
def test_no_token_is_fine_on_loopback_only(host: str) -> None:
    """A service that others can reach does not start without one."""
    assert not is_loopback(host)
    with pytest.raises(ValueError, match="GRAFT_TOKEN"):
        load_token(Settings(host=host))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_addresses(host: str) -> None:
    """All of 127/8, ::1 and the name."""
    assert is_loopback(host)


@pytest.mark.parametrize("token", ["", "  ", "\n"])
def test_empty_tokens_are_refused(tmp_path: Path, token: str) -> None:
    """An empty secret is a mistake, not open access."""
    file = tmp_path / "token"
    file.write_text(token)
    with pytest.raises(ValueError, match="empty"):
        load_token(Settings(token_file=file))
    with pytest.raises(ValueError, match="empty"):
        load_token(Settings(token=SecretStr(token)))


async def test_without_its_lifespan_the_app_lets_nobody_in(tmp_path: Path) -> None:
    """Run by a server that skips the lifespan, the token is never read, so no token is right."""
    app = create_app(Settings(state_dir=tmp_path, token=SecretStr("t")))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for headers in ({}, {"authorization": "Bearer t"}, {"authorization": "Bearer "}):
            assert code(await http.get("/v1/status", headers=headers)) == "unauthorized"


async def test_the_app_does_not_start_without_a_needed_token(tmp_path: Path) -> None:
    """Not even when it is run by something else than the command line."""
    with pytest.raises(ValueError, match="GRAFT_TOKEN"):
        async with running(tmp_path, host="0.0.0.0"):
            pass
