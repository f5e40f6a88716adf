"""Addresses: taken ones are refused with their name, URLs reach what listens."""

import pytest

from app.listen import AddressError, listen, require_free, url_of


def test_a_taken_port_is_named() -> None:
    """The refusal says which address is in use."""
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=f"127.0.0.1:{port} is in use"):
            require_free("127.0.0.1", port)
    require_free("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    """An address that is not ours is refused with the system's reason, not with a traceback."""
    with pytest.raises(AddressError, match=r"cannot listen on 192\.0\.2\.1:9"):
        listen("192.0.2.1", 9)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8001"),
        ("0.0.0.0", "http://127.0.0.1:8001"),
        ("::", "http://[::1]:8001"),
        ("::1", "http://[::1]:8001"),
        ("box.example", "http://box.example:8001"),
    ],
)
def test_urls_reach_what_listens(host: str, url: str) -> None:
    """Wildcards are reached over loopback, and IPv6 addresses stand in brackets."""
    assert url_of(host, 8001) == url
