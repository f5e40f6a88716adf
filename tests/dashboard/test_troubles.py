"""The dashboard where things come in an awkward order, or go wrong."""

import asyncio
from pathlib import Path

import pytest
from playwright.async_api import Route

from schemas.base import Output
from schemas.events import ResetEvent
from tests.app.reader import reading
from tests.dashboard.board import Held, shown
from tests.fakes.admin import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_events_are_newer_than_what_is_read(tmp_path: Path) -> None:
    """A transaction that ended while the page read of it stays ended, whenever the answer comes."""
    async with shown(tmp_path) as board:
        await board.ready()
        transaction = await board.admin.open(label="short")
        held = Held()
        await board.page.route(f"**{transaction}", held)
        await board.page.reload()
        await asyncio.wait_for(held.asked.wait(), 10)
        await board.admin.http.delete(transaction)
        await board.shows("short: aborted", "#transactions")
        held.go_on.set()
        await board.commit(0, 0)
        await board.shows("version 1", "#transactions")
        assert await board.page.get_by_text("short: aborted").count() == 1
        assert await board.page.get_by_text("short: open").count() == 0


async def test_a_commit_while_experts_are_first_read(tmp_path: Path) -> None:
    """The map that was on its way is not the last that is read."""
    async with shown(tmp_path, event_look_s=60) as board:
        await board.ready()
        held = Held()
        await board.page.route("**/v1/model/experts", held)
        await board.page.reload()
        await asyncio.wait_for(held.asked.wait(), 10)
        await board.commit(3, 3)
        await board.page.locator("tr[data-version='1'][aria-current=true]").wait_for()
        held.go_on.set()
        await board.page.locator("[aria-label='layer 3, expert 3: version 1']").wait_for(timeout=10_000)


async def test_rolling_back_while_the_state_is_read_anew(tmp_path: Path) -> None:
    """After a reset the table is still there, and its buttons do what they say."""
    async with shown(tmp_path) as board:
        await board.ready()
        await board.commit(0, 0)
        await board.page.locator("tr[data-version='1'][aria-current=true]").wait_for()
        asked = asyncio.Event()
        await board.page.route("**/v1/versions", lambda route: asked.set())
        board.admin.service.feed.publish(ResetEvent())
        await asyncio.wait_for(asked.wait(), 10)
        await board.page.get_by_role("button", name="Roll back to version 0").click()
        dialog = board.page.get_by_role("dialog", name="Roll back to version 0?")
        assert "The engine runs version 1." in await dialog.inner_text()
        await dialog.get_by_role("button", name="Roll back", exact=True).click()
        await dialog.wait_for(state="hidden")
        assert await board.admin.version() == "2"


async def test_what_could_not_be_read_is_read_again(tmp_path: Path) -> None:
    """One failed request is said, tried again, and then said no more; the stream need not break for that."""
    async with shown(tmp_path) as board:
        await board.ready()
        await board.page.route("**/v1/status", lambda route: route.abort())
        await board.page.reload()
        await board.shows("The service does not answer.", "#trouble")
        await board.page.unroute("**/v1/status")
        await board.ready()
        await board.page.locator("#trouble").wait_for(state="hidden")
        await board.shows("serving", "#engine")


async def test_too_many_readers_is_said(tmp_path: Path) -> None:
    """Why the page does not get the stream; once there is room it is live and says so."""
    async with shown(tmp_path, event_readers=1) as board:
        await board.ready()
        await board.page.goto("about:blank")
        await until(lambda: board.admin.service.feed.readers == 0)
        port = int(board.url.rstrip("/").rpartition(":")[2])
        async with reading(port):
            await board.page.goto(board.url)
            await board.shows("Too many streams of events are open (too_many_readers)", "#trouble")
        await board.page.locator("#connection[data-state=live]").wait_for()
        await board.page.locator("#trouble").wait_for(state="hidden")


async def test_a_stream_that_ends_at_once_is_not_asked_for_without_pause(tmp_path: Path) -> None:
    """Each attempt that brought no event waits longer; the first event makes an end of that."""
    async with shown(tmp_path) as board:
        await board.ready()
        pauses = "window.pauses = []; const after = setTimeout;"
        pauses += "window.setTimeout = (run, ms) => (ms > 1e4 || window.pauses.push(ms), after(run, ms));"
        await board.page.add_init_script(pauses)
        asked: list[str] = []

        async def empty(route: Route) -> None:
            asked.append(route.request.url)
            await route.fulfill(headers={"content-type": "text/event-stream"}, body="retry: 1000\n\n")

        await board.page.route("**/v1/events", empty)
        await board.page.reload()
        await until(lambda: len(asked) >= 4)
        await board.page.unroute("**/v1/events")
        await board.page.locator("#connection[data-state=live]").wait_for()
        found = [ms for ms in await board.page.evaluate("window.pauses") if ms in (0, 500, 1000, 2000)]
        assert found[:4] == [0, 500, 1000, 2000]


class _Senseless(Output):
    """An event without what it is about."""

    type: str = "version"


async def test_an_event_without_sense_does_no_harm(tmp_path: Path) -> None:
    """It is reported, the next ones are shown, and the stream is the same."""
    async with shown(tmp_path) as board:
        await board.ready()
        board.admin.service.feed.publish(_Senseless())  # type: ignore[arg-type]
        await board.commit(5, 5)
        await board.page.locator("[aria-label='layer 5, expert 5: version 1']").wait_for()
        await board.page.locator("#connection[data-state=live]").wait_for()
        assert sum(request.endswith("/v1/events") for request in board.requests) == 1
        assert len(board.faults) == 1
        board.faults.clear()


async def test_a_lost_right_ends_the_question(tmp_path: Path) -> None:
    """If the token is no longer good, login is not behind the dialog: the field for it has the focus."""
    async with shown(tmp_path, token="first") as board:
        await board.page.get_by_label("Token").fill("first")
        await board.page.keyboard.press("Enter")
        await board.ready()
        board.admin.http.headers["authorization"] = "Bearer first"
        await board.commit(0, 0)
        await board.page.get_by_role("button", name="Roll back to version 0").click()
        board.admin.service.token = "second"
        board.admin.http.headers["authorization"] = "Bearer second"
        await board.admin.http.put("/v1/baselines/good")
        await board.page.locator("#login").wait_for()
        assert await board.page.get_by_role("dialog").count() == 0
        assert await board.page.evaluate("document.activeElement.id") == "token"
        assert await board.page.locator("#current").is_hidden()


async def test_a_question_that_was_closed_meddles_with_no_other(tmp_path: Path) -> None:
    """A rollback that was asked for and hidden by Escape ends, and the next question stays open."""
    async with shown(tmp_path) as board:
        await board.ready()
        await board.commit(0, 0)
        await board.commit(0, 1)
        go_on = asyncio.Event()

        async def late(route: Route) -> None:
            await go_on.wait()
            await route.continue_()

        await board.page.route("**/v1/rollback", late)
        await board.page.get_by_role("button", name="Roll back to version 0").click()
        await board.page.get_by_role("button", name="Roll back", exact=True).click()
        await board.page.keyboard.press("Escape")
        await board.page.get_by_role("button", name="Roll back to version 1").click()
        go_on.set()
        await board.page.locator("tr[data-version='3'][aria-current=true]").wait_for()
        await asyncio.sleep(0.3)
        dialog = board.page.get_by_role("dialog", name="Roll back to version 1?")
        assert await dialog.is_visible()
        await board.page.keyboard.press("Escape")
        await dialog.wait_for(state="hidden")
        label = "document.activeElement.getAttribute('aria-label')"
        assert await board.page.evaluate(label) == "Roll back to version 1"


async def test_markup_in_what_clients_say_is_text(tmp_path: Path) -> None:
    """Labels and names stand on the page as they were sent, and run nothing."""
    label = "<img src=x onerror=document.title=1><b>bold</b>"
    async with shown(tmp_path) as board:
        await board.ready()
        await board.commit(0, 0, label=label)
        await board.shows(label, "#versions")
        await board.shows(f"{label}: committed", "#transactions")
        assert label in await board.page.locator("#announcer").inner_text()
        await board.page.get_by_role("button", name="Roll back to version 0").click()
        await board.page.keyboard.press("Escape")
        await board.commit(0, 1)
        await board.page.get_by_role("button", name="Roll back to version 1").click()
        assert label in await board.page.locator("#rollback-text").inner_text()
        assert await board.page.locator("b, img").count() == 0
        assert await board.page.title() == "Graft"
