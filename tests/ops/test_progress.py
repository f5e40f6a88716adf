"""What a person sees while the engine loads."""

import io

import pytest
from rich.console import Console

from app import progress
from app.progress import LiveProgress, PlainProgress, progress_on


def _console(terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=80), out


def test_a_terminal_gets_a_live_line_and_a_file_gets_plain_ones() -> None:
    """The kind of progress follows from what the output is."""
    assert isinstance(progress_on(_console(terminal=False)[0]), PlainProgress)
    live = progress_on(_console(terminal=True)[0])
    live.close()
    assert isinstance(live, LiveProgress)


def test_plain_lines_tell_news_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same news is said once, and nothing more often than every few seconds."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console, out = _console(terminal=False)
    plain = progress_on(console)
    for at, news in ((100, "one"), (101, "two"), (106, "one"), (112, "three [x]"), (130, "three [x]")):
        now[0] = at
        plain.update(news)
    plain.close()
    said = [line.partition(": ")[2] for line in out.getvalue().splitlines()]
    assert said == ["one", "three [x]"]
    assert "\x1b" not in out.getvalue()


def test_a_live_line_never_wraps_and_takes_log_text_literally() -> None:
    """Brackets in the log are no markup, and a long message is cut to the width."""
    console, out = _console(terminal=True)
    live = progress_on(console)
    live.update("[red]GET[/red] " + "x" * 500)
    live.close()
    assert "[red]GET" in out.getvalue()
    assert "x" * 80 not in out.getvalue()
