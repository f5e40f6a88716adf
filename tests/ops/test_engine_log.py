"""Reading the engine's log."""

from pathlib import Path

from app.engine_log import doing, last_lines


def test_last_lines_of_a_long_log(tmp_path: Path) -> None:
    """Only the end of the file is given, in order, without blank lines."""
    log = tmp_path / "log"
    log.write_text("".join(f"line {i}\n\n" for i in range(50_000)))
    assert last_lines(log, 3) == ["line 49997", "line 49998", "line 49999"]


def test_no_log_yet(tmp_path: Path) -> None:
    """Before the engine has written anything there is nothing to show, and no error."""
    assert last_lines(tmp_path / "none", 3) == []
    assert doing(tmp_path / "none") == ""


def test_what_the_engine_does_is_shown_without_its_prefixes(tmp_path: Path) -> None:
    """Process name, level, time and place in the source are left out; the message stays."""
    log = tmp_path / "log"
    log.write_text(
        "(EngineCore pid=53) INFO 11-29 21:33:38 [weight_utils.py:12] Loading weights took 2.5 seconds\n"
    )
    assert doing(log) == "Loading weights took 2.5 seconds"
    log.write_text("INFO 11-29 21:33:38 [api_server.py:9] Route: /health [GET]\n")
    assert doing(log) == "Route: /health [GET]"


def test_lines_that_are_no_messages_are_passed_over(tmp_path: Path) -> None:
    """Pieces of warnings and tracebacks between two messages say nothing to a person who waits."""
    log = tmp_path / "log"
    log.write_text(
        "INFO 11-29 21:33:38 [a.py:9] Loading\n/x/torch/y.py:3: UserWarning\n  wrapper = lookup()\n"
    )
    assert doing(log) == "Loading"


def test_progress_bars_show_their_last_state(tmp_path: Path) -> None:
    """A bar is redrawn with carriage returns: the newest drawing counts; broken UTF-8 does no harm."""
    log = tmp_path / "log"
    log.write_bytes(b"Loading shards:  0%\rLoading shards: 50% \xe2\x96")
    assert doing(log).startswith("Loading shards: 50%")
