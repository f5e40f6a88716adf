"""Peak memory of this process, as the kernel counts it."""

from pathlib import Path
from types import TracebackType
from typing import Self

_SELF = Path("/proc/self")


class Peak:
    """How much the resident memory of this process rises above where it stood, mapped files included."""

    nbytes = 0

    def __enter__(self) -> Self:
        (_SELF / "clear_refs").write_text("5")  # the high-water mark begins anew
        self._before = _status("VmRSS")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.nbytes = _status("VmHWM") - self._before


def _status(field: str) -> int:
    lines = (_SELF / "status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def mib(nbytes: float) -> str:
    """For people."""
    return f"{nbytes / (1 << 20):.3g} MiB"
