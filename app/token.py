"""The bearer token: who needs one, and where it is found."""

import ipaddress

from app.settings import Settings


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a socket bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def load_token(settings: Settings) -> str | None:
    """The bearer token, or none if access is open. Reads a file if one is named.

    Raises ValueError if the token is empty or if a service that others can reach has none.
    """
    token = settings.token.get_secret_value() if settings.token is not None else None
    if token is None and settings.token_file is not None:
        token = settings.token_file.read_text(encoding="utf-8")
    if token is None:
        if not is_loopback(settings.host):
            raise ValueError(
                f"Refusing to listen on {settings.host} without a token: "
                "set GRAFT_TOKEN or GRAFT_TOKEN_FILE, or bind to 127.0.0.1."
            )
        return None
    token = token.strip()
    if not token:
        raise ValueError("The token is empty: set GRAFT_TOKEN or GRAFT_TOKEN_FILE to a secret.")
    return token
