"""The addresses that the services listen on."""

import errno
import socket


class AddressError(Exception):
    """An address cannot be listened on; the text names it and says why."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket for the admin; port 0 takes any free one. Raises AddressError."""
    try:
        return socket.create_server((host, port), family=_family(host), backlog=2048)
    except OSError as error:
        raise AddressError(_why(host, port, error)) from error


def require_free(host: str, port: int) -> None:
    """Raises AddressError if the engine, which is only about to start, could not listen there."""
    listen(host, port).close()


def url_of(host: str, port: int) -> str:
    """Where a client on this machine reaches what listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - not bound here
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _why(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{host}:{port} is in use by another process"
    return f"cannot listen on {host}:{port}: {error.strerror or error}"
