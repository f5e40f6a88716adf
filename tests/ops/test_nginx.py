"""deploy/nginx.conf in the real nginx: a large upload passes through without being gathered there."""

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.listen import listen
from tests.fakes.engine import HIDDEN
from tests.ops.served import Serve, Served, fake_engine
from tests.ops.tools import DEPLOY, ran, tool

pytestmark = pytest.mark.slow

MIB = 1 << 20
NBYTES = 200 * MIB
ROWS = NBYTES // 2 // HIDDEN
TOKEN = "t"
NAME = "model.embed_tokens.weight"


class Proxy:
    """A running nginx with the example's configuration, and what it costs."""

    def __init__(self, folder: Path, url: str, master: int) -> None:
        self.url = url
        self.temporary = folder / "temporary"
        self._master = master

    def client(self, token: str = TOKEN) -> httpx.Client:
        headers = {"authorization": f"Bearer {token}", "content-type": "application/octet-stream"}
        return httpx.Client(base_url=self.url, headers=headers, verify=False, timeout=120)

    @property
    def temporary_nbytes(self) -> int:
        """Bytes of temporary files, also of such as have no name any more."""
        named = sum(path.stat().st_blocks * 512 for path in self.temporary.rglob("*") if path.is_file())
        return named + sum(
            fd.stat().st_blocks * 512
            for pid in self._workers()
            for fd in Path(f"/proc/{pid}/fd").iterdir()
            if str(self.temporary) in str(fd.readlink())
        )

    @property
    def peak_nbytes(self) -> int:
        """Largest resident memory that any worker has had."""
        return max(peak(pid) for pid in self._workers())

    def _workers(self) -> list[int]:
        children = Path(f"/proc/{self._master}/task/{self._master}/children").read_text()
        return [int(pid) for pid in children.split()]


def peak(pid: int) -> int:
    """Peak resident bytes of a process."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found
    return int(found[1]) * 1024


@pytest.fixture
def served(serve: Serve, free_port: int) -> Served:
    """An admin whose engine's model has a tensor of 200 MiB."""
    more = f"engine.alter({NAME!r}, shape=({ROWS}, {HIDDEN}))"
    made = serve(fake_engine(more), "m", "--engine-port", str(free_port), GRAFT_TOKEN=TOKEN)
    made.wait_for("# roll back")
    return made


@pytest.fixture
def proxy(served: Served, tmp_path: Path) -> Iterator[Proxy]:
    """nginx before it; only addresses and folders are other ones than in the example."""
    with listen("127.0.0.1", 0) as probe:
        port: int = probe.getsockname()[1]
    subject = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost")
    ran("openssl", *subject, "-keyout", tmp_path / "key.pem", "-out", tmp_path / "certificate.pem")
    folders = "".join(
        f"    {kind}_temp_path {tmp_path}/temporary/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (tmp_path / "temporary").mkdir(mode=0o755)
    text = (DEPLOY / "nginx.conf").read_text()
    for old, new in (
        ("server 127.0.0.1:8001;", f"server {served.admin.removeprefix('http://')};"),
        ("listen 8443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("http {\n", f"http {{\n{folders}"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "nginx.conf").write_text(text)
    user = "user root; " if os.geteuid() == 0 else ""  # pytest's folders are for the tests' user alone
    options = ["-p", str(tmp_path), "-c", "nginx.conf", "-e", "stderr"]
    options += ["-g", f"{user}daemon off; pid {tmp_path}/nginx.pid;"]
    ran("nginx", *options, "-t")
    with (tmp_path / "nginx.log").open("w") as log:
        nginx = subprocess.Popen([tool("nginx"), *options], stdout=log, stderr=log)
    try:
        made = Proxy(tmp_path, f"https://127.0.0.1:{port}", nginx.pid)
        _wait(made)
        yield made
    finally:
        nginx.terminate()
        nginx.wait(30)


def _wait(proxy: Proxy) -> None:
    for _ in range(200):
        try:
            with proxy.client() as client:
                assert client.get("/health/live").status_code == 200
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("nginx does not listen")


def _body() -> Iterator[bytes]:
    """A safetensors file of one tensor, a mebibyte at a time."""
    entry = {"dtype": "BF16", "shape": [ROWS, HIDDEN], "data_offsets": [0, NBYTES]}
    header = json.dumps({NAME: entry}).encode()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    for number in range(NBYTES // MIB):
        yield number.to_bytes(1, "little") * MIB


def _length() -> int:
    return sum(len(piece) for piece in _body())


def test_a_large_upload_passes_through(proxy: Proxy, served: Served) -> None:
    """Twice 200 MiB, whole; nginx keeps next to nothing of it in memory or files, nor does the admin."""
    most = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, proxy.temporary_nbytes)

    before = proxy.peak_nbytes, peak(served.process.pid)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with proxy.client() as client:
            path = client.post("/v1/transactions").headers["location"]
            length = {"content-length": str(_length())}
            answer = client.post(f"{path}/patches", content=_body(), headers=length)
            assert answer.status_code == 200, answer.text
            chunked = client.post(f"{path}/patches", content=_body())
            assert chunked.status_code == 200, chunked.text
            assert client.get(path).json()["nbytes"] == 2 * _length()
            client.delete(path)
    finally:
        done.set()
        watcher.join()
    assert answer.json()["blake3"] == chunked.json()["blake3"]
    assert answer.json()["nbytes"] == _length()
    assert most < MIB
    assert proxy.peak_nbytes - before[0] < 32 * MIB
    assert peak(served.process.pid) - before[1] < 64 * MIB


def test_what_graft_refuses_is_what_the_client_gets(proxy: Proxy, served: Served) -> None:
    """A refusal before the body was read comes through as Graft's problem document, with the request's id."""
    with proxy.client(token="wrong") as client:
        answer = client.post(
            "/v1/patches", content=_body(), headers={"content-length": str(_length()), "x-request-id": "abc"}
        )
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
    assert answer.headers["x-request-id"] == "abc"


def test_requests_without_an_id_get_one_from_nginx(proxy: Proxy, served: Served) -> None:
    """32 hex digits, nginx's form, which Graft's log then has."""
    with proxy.client() as client:
        given = client.get("/v1/versions").headers["x-request-id"]
    assert re.fullmatch(r"[0-9a-f]{32}", given)
    served.wait_for(f'"request": "{given}"')


def test_read_backs_pass_through(proxy: Proxy, served: Served) -> None:
    """What the admin sends is what the client gets, with its version."""
    path = "/v1/tensors/model.layers.0.self_attn.q_proj.weight"
    with proxy.client() as client:
        through = client.get(path)
    direct = httpx.get(served.admin + path, headers={"authorization": f"Bearer {TOKEN}"})
    assert through.content == direct.content and len(direct.content) > 2 * HIDDEN * HIDDEN
    assert through.headers["etag"] == direct.headers["etag"] == '"0"'
