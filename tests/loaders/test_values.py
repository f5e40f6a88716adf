"""Checks of values and indices: exact bounds, every dtype, and the three ways to find repeated indices."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loaders import values
from loaders.values import IndexFault
from schemas.dtypes import Dtype

_FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@contextmanager
def spanned(folder: Path, data: bytes, before: bytes = b"x" * 3) -> Iterator[tuple[int, int, int]]:
    """A descriptor, offset and size of `data` within a file, not aligned and not at its end."""
    path = folder / "span"
    path.write_bytes(before + data + b"yyy")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor, len(before), len(data)
    finally:
        os.close(descriptor)


@pytest.fixture(params=["sorted in memory", "one window", "many windows"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces, and each of the ways to find repeats."""
    monkeypatch.setattr(values, "CHUNK_NBYTES", 32)
    if request.param != "sorted in memory":
        monkeypatch.setattr(values, "SORT_NBYTES", 0)
    if request.param == "many windows":
        monkeypatch.setattr(values, "WINDOW", 8)


def fault_of(folder: Path, indices: list[int], numel: int, dtype: Dtype = Dtype.I64) -> str | None:
    """What is wrong with the indices of a tensor of `numel` elements."""
    data = np.array(indices, "<i8" if dtype is Dtype.I64 else "<i4").tobytes()
    with spanned(folder, data) as (descriptor, offset, nbytes):
        try:
            scan = values.scan_indices(descriptor, offset, nbytes, dtype)
            if scan.high >= numel:
                return f"{values.first_out_of_range(descriptor, offset, nbytes, dtype, numel)} is too high"
            values.check_unique(descriptor, offset, nbytes, dtype, scan)
        except IndexFault as error:
            return error.what if error.position is None else f"{error.position} {error.what}"
    return None


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [Dtype.I32, Dtype.I64])
@pytest.mark.parametrize(
    ("indices", "fault"),
    [
        ([], None),
        ([0], None),
        ([99], None),
        ([100], "0 is too high"),
        ([2**31 - 1], "0 is too high"),
        ([-1], "0 is negative"),
        ([-(2**31)], "0 is negative"),
        ([0, 1, 2, -1], "3 is negative"),
        ([*range(50), 100, 7], "50 is too high"),
        ([0, 0], "is repeated"),
        ([99, 3, 99], "is repeated"),
        ([0, 1, 2, 3, 3, 4], "is repeated"),  # on both sides of a piece's end, I64
        ([*range(8), 7, 8], "is repeated"),  # and I32
        ([3, 2, 1, 0], None),
        ([7, 8, 15, 16, 0], None),
        ([*range(100)], None),
        ([*range(99, -1, -1)], None),
        ([*range(99, -1, -1), 0], "is repeated"),
        ([*range(20, 60), 20], "is repeated"),
        ([*range(20), *range(40, 19, -1), 33], "is repeated"),
    ],
)
def test_indices(tmp_path: Path, indices: list[int], fault: str | None, dtype: Dtype) -> None:
    """Bounds are exact, negative ones do not wrap, repeats are found however far apart."""
    assert fault_of(tmp_path, indices, 100, dtype) == fault


@pytest.mark.parametrize("index", [2**63 - 1, 2**32, -(2**63), 2**31])
def test_indices_of_64_bits(tmp_path: Path, index: int) -> None:
    """Huge indices are refused by their true value, not by their low 32 bits."""
    assert fault_of(tmp_path, [5, index], 100) is not None


@pytest.mark.usefixtures("way")
@_FIXTURE
@given(indices=st.lists(st.integers(0, 60), max_size=70), dtype=st.sampled_from([Dtype.I32, Dtype.I64]))
def test_repeats_are_found_exactly(tmp_path: Path, indices: list[int], dtype: Dtype) -> None:
    """Each way says what a set says, for short and long lists in any order."""
    expected = None if len(set(indices)) == len(indices) else "is repeated"
    assert fault_of(tmp_path, indices, 61, dtype) == expected


@pytest.mark.usefixtures("way")
@_FIXTURE
@given(indices=st.permutations(range(48)), repeat=st.none() | st.integers(0, 47))
def test_repeats_among_many(tmp_path: Path, indices: list[int], repeat: int | None) -> None:
    """A full permutation passes; with one index written twice it does not."""
    sent = indices if repeat is None else [*indices, repeat]
    assert fault_of(tmp_path, sent, 48) == (None if repeat is None else "is repeated")


_FLOATS = [
    (Dtype.F16, "<u2", [0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF], [0, 0x8000, 0x7BFF, 0xFBFF, 0x0001]),
    (Dtype.BF16, "<u2", [0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF], [0, 0x8000, 0x7F7F, 0xFF7F, 0x0001]),
    (Dtype.F32, "<u4", [0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000], [0, 0x7F7FFFFF, 0xFF7FFFFF, 1]),
    (Dtype.F64, "<u8", [0x7FF << 52, 0xFFF << 52, (0x7FF << 52) + 1], [0, (0x7FF << 52) - 1, 1 << 63]),
    (Dtype.F8_E4M3, "<u1", [0x7F, 0xFF], [0, 0x7E, 0xFE, 0x80, 0x78]),
    (Dtype.F8_E5M2, "<u1", [0x7C, 0xFC, 0x7D, 0x7F, 0xFF], [0, 0x7B, 0xFB, 0x80]),
    (Dtype.F8_E8M0, "<u1", [0xFF], [0, 0x7F, 0x80, 0xFE]),
]


@pytest.mark.parametrize(("dtype", "word", "bad", "good"), _FLOATS, ids=lambda one: str(one)[:8])
def test_nonfinite(tmp_path: Path, dtype: Dtype, word: str, bad: list[int], good: list[int]) -> None:
    """Every NaN and infinity is found at its place; the largest finite numbers are not."""
    with spanned(tmp_path, np.array(good * 9, word).tobytes()) as span:
        assert values.first_nonfinite(*span, dtype) is None
    for bits in bad:
        with spanned(tmp_path, np.array([*good, bits, *good, bits], word).tobytes()) as span:
            assert values.first_nonfinite(*span, dtype) == len(good)


def test_every_float_is_in_the_table() -> None:
    """No dtype that can hold NaN goes unchecked."""
    assert {row[0] for row in _FLOATS} == {dtype for dtype in Dtype if dtype.is_floating}


def test_nonfinite_in_a_later_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions count over the pieces in which a span is read."""
    monkeypatch.setattr(values, "CHUNK_NBYTES", 16)
    for at in range(30):
        data = np.zeros(30, "<f4")
        data[at] = np.nan
        with spanned(tmp_path, data.tobytes()) as span:
            assert values.first_nonfinite(*span, Dtype.F32) == at


def test_the_first_nonfinite_of_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of a long span are looked at apart, and what is found is the first by position."""
    monkeypatch.setattr(values, "SHARE_NBYTES", 64)
    for bad in ([], [0], [15], [16], [99], [40, 17, 80]):
        numbers = np.ones(100, np.float32)
        numbers[bad] = np.nan
        path = tmp_path / "span"
        path.write_bytes(b"12345678" + numbers.tobytes())
        with path.open("rb") as file:
            found = values.first_nonfinite(file.fileno(), 8, numbers.nbytes, Dtype.F32)
        assert found == min(bad, default=None)


@pytest.mark.parametrize("dtype", [dtype for dtype in Dtype if not dtype.is_floating])
def test_integers_are_always_finite(tmp_path: Path, dtype: Dtype) -> None:
    """Integers of all bits are numbers."""
    with spanned(tmp_path, b"\xff" * 16) as span:
        assert values.first_nonfinite(*span, dtype) is None


def test_bools(tmp_path: Path) -> None:
    """Only 0 and 1 are truth values."""
    with spanned(tmp_path, b"\0\1\1\0") as span:
        assert values.first_not_bool(*span) is None
    with spanned(tmp_path, b"\0\1\2\xff") as span:
        assert values.first_not_bool(*span) == 2


def test_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are compared over all their pieces."""
    monkeypatch.setattr(values, "CHUNK_NBYTES", 4)
    with spanned(tmp_path, b"0123456789" * 2 + b"012345678x") as (descriptor, offset, _):
        assert values.same_bytes((descriptor, offset), (descriptor, offset + 10), 10)
        assert not values.same_bytes((descriptor, offset), (descriptor, offset + 20), 10)
        assert values.same_bytes((descriptor, offset), (descriptor, offset + 20), 9)
        assert values.same_bytes((descriptor, offset), (descriptor, offset), 10)


def test_short_file_is_no_endless_loop(tmp_path: Path) -> None:
    """A file that ends within a span is a fault of the disk, said as such."""
    with spanned(tmp_path, b"1234") as (descriptor, offset, _), pytest.raises(OSError, match="shorter"):
        values.first_nonfinite(descriptor, offset, 100, Dtype.F32)


_MEASURE = """
import os, resource, sys
import numpy as np
from loaders import values
from schemas.dtypes import Dtype

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

descriptor = os.open(sys.argv[1], os.O_RDONLY)
nbytes = os.fstat(descriptor).st_size
before = peak()
values.first_nonfinite(descriptor, 0, nbytes, Dtype.F32)
scan = values.scan_indices(descriptor, 0, nbytes, Dtype.I32)
values.check_unique(descriptor, 0, nbytes, Dtype.I32, scan)
values.check_unique(descriptor, 0, values.SORT_NBYTES, Dtype.I32, scan)
print(peak() - before)
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    """All checks of 64 MiB of indices over 400 million positions, both ways, take at most 48 MiB."""
    count = 16 << 20
    indices = np.arange(count, dtype="<i4")[::-1] * 25
    (tmp_path / "span").write_bytes(indices.tobytes())
    command = [sys.executable, "-c", _MEASURE, str(tmp_path / "span")]
    measured = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(measured.stdout) <= 48 << 20
