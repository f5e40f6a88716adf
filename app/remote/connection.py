"""What every client tells httpx, and how stubborn it is."""

from typing import Any
from urllib.parse import urlsplit

import httpx

from app.remote.attempts import Retry

URL = "http://127.0.0.1:8001"
SILENCE_S = 1800.0
"""How long an answer may take: the longest prepare and commit that a service allows by default fit in."""
CONNECT_S = 10.0
"""How long it may take to be connected."""
STUBBORN = Retry()
HURRIED = Retry(times=1, patience_s=0)
"""For tidying up after something went wrong already."""


def options(url: str, token: str | None, silence_s: float) -> dict[str, Any]:
    """Arguments of both of httpx's clients. Proxies are not asked for what is on this machine."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    timeout = httpx.Timeout(silence_s, connect=CONNECT_S, write=60)
    here = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
    return {"base_url": url, "headers": headers, "timeout": timeout, "trust_env": not here}
