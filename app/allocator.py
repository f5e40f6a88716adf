"""The allocator: told to keep what pieces of bodies free, which the next ones need again."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""`M_…` of glibc's malloc.h."""
KEPT_NBYTES = 64 << 20
"""Freed bytes that stay with the process, about."""
PIECE_NBYTES = 4 << 20
"""Largest allocation that is kept; all pieces of a body are smaller."""


def keep_freed() -> None:
    """Have the process keep freed memory up to a bound; elsewhere than with glibc nothing is done.

    By default each piece of a body is fresh memory from the kernel, which it has to clear page by page:
    that takes longer than hashing the piece and writing it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, PIECE_NBYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_NBYTES)
