"""The dashboard, used as people use it: seen, by keyboard, with a screen reader's eyes."""

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from axe_playwright_python.base import AXE_FILE_PATH

from tests.app.sockets import served
from tests.dashboard.board import EXPERTS, LAYERS, Board, looking, shown
from tests.fakes.admin import expert_body, running, until
from tests.fakes.engine import FakeEngine

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

IMAGES = Path(__file__).parents[2] / "docs" / "images"


async def violations(board: Board) -> list[str]:
    """What axe finds wrong, as rule and element."""
    await board.page.evaluate(AXE_FILE_PATH.read_text())
    found = await board.page.evaluate("axe.run({resultTypes: ['violations']})")
    return [f"{one['id']}: {node['target']}" for one in found["violations"] for node in one["nodes"]]


async def focused(board: Board) -> str:
    """What a screen reader says of the element that has the focus."""
    text = await board.page.evaluate("document.activeElement.getAttribute('aria-label')")
    return str(text)


async def history(board: Board) -> None:
    """Some versions, so that there is something to see."""
    for layer in range(0, LAYERS, 3):
        transaction = await board.admin.open(label=f"pass over layer {layer}")
        for expert in range(layer % 5, EXPERTS, 5 + layer % 7):
            (await board.admin.upload(transaction, layer, layer, expert)).raise_for_status()
        (await board.admin.http.post(f"{transaction}/commit")).raise_for_status()
    await board.admin.http.put("/v1/baselines/before-night", json={"version": "4"})


async def test_commits_show_live(tmp_path: Path) -> None:
    """All cells are there; a commit changes its cell, its row, the current version, and is announced."""
    async with shown(tmp_path) as board:
        page = board.page
        await board.ready()
        assert await page.locator("#grid [role=row]").count() == LAYERS
        assert await page.locator("#grid [role=gridcell]").count() == LAYERS * EXPERTS
        assert await board.cell(7, 100) == "layer 7, expert 100: base"
        await board.commit(7, 100, label="seventh heaven")
        await page.locator("[aria-label='layer 7, expert 100: version 1']").wait_for()
        await board.shows("seventh heaven", "#versions")
        await page.locator("tr[data-version='1'][aria-current=true]").wait_for()
        assert await page.locator("#current").inner_text() == "version 1"
        assert await page.locator("#announcer").inner_text() == "Version 1 is current: commit, seventh heaven"
        assert "6.0 ms" in await page.locator("tr[data-version='1']").inner_text()
        legend = await page.locator("#legend").inner_text()
        assert "version 1: 1" in legend
        assert f"base: {LAYERS * EXPERTS - 1}" in legend
        assert await board.cell(7, 99) == "layer 7, expert 99: base"


async def test_the_grid_by_keyboard(tmp_path: Path) -> None:
    """One stop for Tab; arrows, Home, End and Page keys move and stay inside; Enter goes to the version."""
    async with shown(tmp_path) as board:
        await board.ready()
        await board.commit(0, 1)
        await board.page.locator("[aria-label='layer 0, expert 1: version 1']").wait_for()
        assert await board.page.locator("#grid [tabindex='0']").count() == 1
        await board.page.locator("#grid [tabindex='0']").focus()
        for keys, place in (
            ("ArrowLeft", (0, 0)),
            ("ArrowDown", (1, 0)),
            ("End", (1, EXPERTS - 1)),
            ("ArrowRight", (1, EXPERTS - 1)),
            ("PageDown", (9, EXPERTS - 1)),
            ("Control+End", (LAYERS - 1, EXPERTS - 1)),
            ("ArrowUp", (LAYERS - 2, EXPERTS - 1)),
            ("Home", (LAYERS - 2, 0)),
            ("Control+Home", (0, 0)),
            ("ArrowRight", (0, 1)),
        ):
            await board.page.keyboard.press(keys)
            assert (await focused(board)).startswith(f"layer {place[0]}, expert {place[1]}:"), keys
        assert await board.page.locator("#grid [tabindex='0']").count() == 1
        assert await board.page.locator("#cell").inner_text() == "layer 0, expert 1: version 1"
        await board.page.keyboard.press("Enter")
        row = "document.activeElement.closest('tr').dataset.version"
        assert await board.page.evaluate(row) == "1"


async def test_rollback_asks_first(tmp_path: Path) -> None:
    """The question names the version; Escape changes nothing; saying yes puts the weights back."""
    async with shown(tmp_path) as board:
        await board.ready()
        await board.commit(3, 5)
        await board.commit(3, 6)
        await board.page.get_by_role("button", name="Roll back to version 1").click()
        dialog = board.page.get_by_role("dialog", name="Roll back to version 1?")
        assert "The engine runs version 2." in await dialog.inner_text()
        await board.page.keyboard.press("Escape")
        await dialog.wait_for(state="hidden")
        assert await board.admin.version() == "2"
        await board.page.get_by_role("button", name="Roll back to version 1").press("Enter")
        assert await board.page.evaluate("document.activeElement.value") == "cancel"
        await dialog.get_by_role("button", name="Roll back", exact=True).click()
        await dialog.wait_for(state="hidden")
        await board.page.locator("tr[data-version='3'][aria-current=true]").wait_for()
        await board.shows("rollback to 1", "#versions")
        await board.page.locator("[aria-label='layer 3, expert 6: base']").wait_for()
        assert await board.cell(3, 5) == "layer 3, expert 5: version 1"
        assert (await board.admin.http.get("/v1/versions/3")).json()["restores"] == "1"


async def test_a_refused_rollback_says_why(tmp_path: Path) -> None:
    """Title and code of the problem stand in the dialog: if it fails, and if the version has moved."""
    async with shown(tmp_path) as board:
        await board.ready()
        await board.commit(0, 0)
        await board.page.get_by_role("button", name="Roll back to version 0").click()
        dialog = board.page.get_by_role("dialog")
        go = dialog.get_by_role("button", name="Roll back", exact=True)
        board.admin.engine.faults.commit[1] = "middle"
        await go.click()
        await board.shows("The commit failed and was undone (commit_undone)", "#rollback")
        board.admin.engine.faults.commit.clear()
        await board.commit(0, 1)
        await go.click()
        await board.shows("If-Match does not name the current version (precondition_failed)", "#rollback")
        assert await board.admin.version() == "2"


async def test_the_token(tmp_path: Path) -> None:
    """The page loads without it and asks for it; it never goes into an address; it can be forgotten."""
    async with shown(tmp_path, token="s3cret-token") as board:
        page = board.page
        headers = {"authorization": "Bearer s3cret-token"}
        await page.get_by_label("Token").fill("wrong")
        await page.keyboard.press("Enter")
        await board.shows("A bearer token is needed (unauthorized)", "#login")
        assert await page.locator("#board").is_hidden()
        await page.get_by_label("Token").fill("s3cret-token")
        await page.keyboard.press("Enter")
        await board.ready()
        assert await page.locator("#login").is_hidden()
        await page.reload()
        await board.ready()
        assert not any("s3cret" in one for one in board.requests)
        await page.get_by_role("button", name="Sign out").click()
        await page.get_by_label("Token").wait_for()
        assert await page.evaluate("sessionStorage.length") == 0
        await until(lambda: board.admin.service.feed.readers == 0)
        assert (await board.admin.http.get("/v1/status", headers=headers)).status_code == 200


async def test_work_engine_and_budgets_show_live(tmp_path: Path) -> None:
    """Open transactions and uploads with their sizes, ranks, what is staged, and an engine that goes away."""
    async with shown(tmp_path, event_look_s=0.05) as board:
        await board.ready()
        assert await board.page.locator("#ranks tbody tr").count() == 2
        transaction = await board.admin.open(label="in the works")
        (await board.admin.upload(transaction, layer=2, expert=9)).raise_for_status()
        await board.shows("in the works: open", "#transactions")
        await board.shows("layer 2, expert 9: accepted", "#uploads")
        await board.shows(f"{len(expert_body())} B of", "#budgets")
        await board.page.reload()
        await board.shows("in the works: open", "#transactions")
        await board.admin.http.delete(transaction)
        await board.shows("in the works: aborted", "#transactions")
        await board.commit(1, 1)
        board.admin.line.cuts["*"] = "refused"
        await (
            board.page.get_by_role("button", name="Roll back to version 0")
            .and_(board.page.locator(":disabled"))
            .wait_for()
        )
        assert (await board.page.locator("#announcer").inner_text()).startswith("The engine can't be changed")
        assert await board.cell(1, 1) == "layer 1, expert 1: version 1"


async def test_a_restart_of_the_service_is_got_over(tmp_path: Path) -> None:
    """The page says that it reconnects, and then shows what it had missed, without being loaded anew."""
    engine = FakeEngine(2, shape=(LAYERS, EXPERTS))
    async with AsyncExitStack() as browsing:
        async with running(tmp_path, engine=engine) as admin, served(admin) as port:
            board = await browsing.enter_async_context(looking(admin, port))
            await board.ready()
            await board.page.evaluate("window.same = true")
            admin.service.feed.close()  # as `graft serve` does when it ends
        await board.page.locator("#connection[data-state=lost]").wait_for()
        async with running(tmp_path, engine=engine) as board.admin:
            await board.commit(4, 4)
            async with served(board.admin, port):
                await board.page.locator("[aria-label='layer 4, expert 4: version 1']").wait_for()
                await board.page.locator("#connection[data-state=live]").wait_for()
                await board.commit(4, 5)
                await board.page.locator("[aria-label='layer 4, expert 5: version 2']").wait_for()
                assert await board.page.evaluate("window.same") is True
                await board.shows("found right by their digests", "#engine")
                board.admin.service.feed.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_accessibility_by_axe(tmp_path: Path, scheme: str) -> None:
    """axe finds nothing: names, roles, contrast, order; with the board, the dialog and the login."""
    async with shown(tmp_path, {"color_scheme": scheme, "reduced_motion": "reduce"}, token="t") as board:
        assert await violations(board) == []
        await board.page.get_by_label("Token").fill("t")
        await board.page.keyboard.press("Enter")
        await board.ready()
        board.admin.http.headers["authorization"] = "Bearer t"
        await history(board)
        await board.shows("pass over layer 33", "#versions")
        assert await violations(board) == []
        await board.page.get_by_role("button", name="Roll back to version 2").click()
        assert await violations(board) == []


@pytest.mark.parametrize("width", [360, 768, 1440, 2560])
async def test_the_page_fits_any_width(tmp_path: Path, width: int) -> None:
    """The page itself never scrolls sideways; on a desktop the grid needs not to either."""
    async with shown(tmp_path, {"viewport": {"width": width, "height": 900}}) as board:
        await board.ready()
        overflow = "e => e.scrollWidth - e.clientWidth"
        assert await board.page.locator("html").evaluate(overflow) == 0
        if width >= 1440:
            assert await board.page.locator("#grid-frame").evaluate(overflow) == 0


async def test_the_files_of_the_page(tmp_path: Path) -> None:
    """With a strict policy, for GET alone, nothing beside them; and what is no file is a problem document."""
    async with running(tmp_path, token="t") as admin:
        for path in ("/", "/dashboard/main.js", "/dashboard/style.css"):
            answer = await admin.http.get(path)
            assert answer.status_code == 200
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert (await admin.http.post(path)).status_code == 405
        for path in ("/dashboard/none", "/dashboard/../main.py", "/dashboard/%2e%2e/main.py", "/dashboard/"):
            answer = await admin.http.get(path)
            assert answer.status_code in (401, 404), path
            assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_pictures_for_the_docs(tmp_path: Path, scheme: str) -> None:
    """A picture of the whole page; with GRAFT_SCREENSHOTS it goes to docs/images."""
    folder = IMAGES if os.environ.get("GRAFT_SCREENSHOTS") else tmp_path
    folder.mkdir(exist_ok=True)
    context = {"color_scheme": scheme, "reduced_motion": "reduce"}
    async with shown(tmp_path / "state", context) as board:
        await board.ready()
        await history(board)
        await board.admin.upload(await board.admin.open(label="evening run"), layer=2, expert=9)
        await board.shows("evening run: open")
        await board.page.locator("[aria-label*='layer 33, expert 3: version 12']").hover()
        await asyncio.sleep(0.5)
        picture = await board.page.screenshot(path=folder / f"dashboard-{scheme}.png")
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 20_000
