"""The dashboard in Debian's Chromium, before an admin with a fake engine of many experts."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, BrowserContext, Page, Route, async_playwright

from tests.app.sockets import served
from tests.fakes.admin import Admin, running
from tests.fakes.engine import FakeEngine

LAYERS, EXPERTS = 36, 128
WIDE = {"width": 1440, "height": 1000}


@dataclass
class Board:
    """A page, the admin that it shows, and what the page did."""

    admin: Admin
    page: Page
    url: str
    requests: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Exceptions, and what the content security policy has stopped."""

    async def cell(self, layer: int, expert: int) -> str:
        """What a screen reader says of a cell."""
        text = (
            await self.page.locator("#grid [role=row]")
            .nth(layer)
            .locator("[role=gridcell]")
            .nth(expert)
            .get_attribute("aria-label")
        )
        return text or ""

    async def commit(self, layer: int, expert: int, seed: int = 1, **options: Any) -> str:
        """Change one expert; the version that it makes."""
        transaction = await self.admin.open(**options)
        (await self.admin.upload(transaction, seed, layer, expert)).raise_for_status()
        answer = (await self.admin.http.post(f"{transaction}/commit")).raise_for_status()
        version: str = answer.json()["version"]
        return version

    async def shows(self, text: str, within: str = "body") -> None:
        """Wait until the text is to be seen, at most 10 s."""
        await self.page.locator(within).get_by_text(text).first.wait_for(timeout=10_000)

    async def ready(self) -> None:
        """Wait until everything is there."""
        await self.page.locator("#connection[data-state=live]").wait_for()
        await self.page.locator("#grid [role=gridcell]").first.wait_for()
        await self.page.locator("#versions tbody tr").first.wait_for()


class Held:
    """A route whose answer is there when `asked` is set, and reaches the page once `go_on` is."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, route: Route) -> None:
        """Handle a request, as Playwright's `route` wants it."""
        answer = await route.fetch()
        self.asked.set()
        await self.go_on.wait()
        await route.fulfill(response=answer)


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Debian's Chromium; it is not looked for elsewhere."""
    executable = shutil.which("chromium")
    assert executable, "apt-get install chromium (make browser does it)"
    async with async_playwright() as playwright:
        found = await playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        try:
            yield found
        finally:
            await found.close()


@asynccontextmanager
async def looking(admin: Admin, port: int, **context: Any) -> AsyncIterator[Board]:
    """A page that shows this admin; it may ask nobody else, and nothing in it may break."""
    url = f"http://127.0.0.1:{port}/"
    async with browser() as found:
        tab: BrowserContext = await found.new_context(**{"viewport": WIDE, **context})
        page = await tab.new_page()
        board = Board(admin, page, url)
        page.on("request", lambda request: board.requests.append(request.url))
        page.on("pageerror", lambda error: board.faults.append(str(error)))
        page.on(
            "console",
            lambda said: board.faults.append(said.text) if "Security Policy" in said.text else None,
        )
        await page.goto(url)
        yield board
        assert board.faults == []
        assert all(request.startswith(url) for request in board.requests)


@asynccontextmanager
async def shown(
    state_dir: Path, context: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Board]:
    """An admin with two ranks of 36 x 128 experts, and the page that shows it."""
    engine = FakeEngine(2, shape=(LAYERS, EXPERTS))
    async with (
        running(state_dir, engine=engine, **{"engine_answer_s": 5, **settings}) as admin,
        served(admin) as port,
        looking(admin, port, **(context or {})) as board,
    ):
        yield board
