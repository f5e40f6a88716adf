"""Write-back: the disk is told about every byte once, in pieces that are worth it."""

from ctypes import c_int64

from app.writeback import Writeback


def test_spans_follow_each_other() -> None:
    """Nothing is asked before a step is full; then for all that has come since the last time."""
    asked: list[tuple[int, int]] = []

    def note(descriptor: int, begin: c_int64, length: c_int64, flags: object) -> None:
        assert descriptor == 3
        asked.append((begin.value, length.value))

    writeback = Writeback(100)
    writeback._call = note
    for end in (40, 99, 130, 200, 230, 231):
        writeback.wrote(3, end)
    assert asked == [(0, 130), (130, 100)]


def test_systems_without_it_write_when_they_like() -> None:
    """Where the call is not there, nothing happens."""
    writeback = Writeback(1)
    writeback._call = None
    writeback.wrote(-1, 10)
