"""nginx that takes files by PUT, as a user would set it up to receive uploads."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CONFIGURATION = """
daemon off;
worker_processes auto;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_max_body_size 0;
  client_body_buffer_size 1m;
  client_body_temp_path {folder}/temp;
  fastcgi_temp_path {folder}/t1; proxy_temp_path {folder}/t2; scgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4;
  server {{
    listen 127.0.0.1:{port};
    location / {{ root {folder}/files; dav_methods PUT; }}
  }}
}}
"""


@contextmanager
def nginx(folder: Path) -> Iterator[tuple[int, Path]]:
    """Its port, and where the files go; temporary ones lie in the same folder, so that they are renamed."""
    (folder / "files").mkdir(parents=True)
    folder.chmod(0o755)
    port = free_port()
    configuration = folder / "nginx.conf"
    user = "user root;\n" if (folder.stat().st_uid == 0) else ""
    configuration.write_text(user + _CONFIGURATION.format(folder=folder, port=port))
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    child = subprocess.Popen([program, "-c", configuration, "-p", folder, "-e", folder / "error.log"])
    try:
        await_port(port)
        yield port, folder / "files"
    finally:
        child.terminate()
        child.wait(10)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def await_port(port: int) -> None:
    """Return once somebody listens. Raises OSError after 10 s."""
    until = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
