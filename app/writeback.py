"""Write-back: asks the kernel to begin putting a file on the disk, so that a later fsync waits less."""

import ctypes

_WRITE = 2
"""SYNC_FILE_RANGE_WRITE: begin, and do not wait."""


class Writeback:
    """Begins with every piece of a file of `step` bytes as soon as it is there; promises nothing."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._begun = 0
        # Python has no name for it; systems other than Linux have none either, and write when they like.
        self._call = getattr(ctypes.CDLL(None), "sync_file_range", None)

    def wrote(self, descriptor: int, end: int) -> None:
        """The file has been written up to `end`; a fault shows at the fsync that has to follow."""
        if self._call is None or end - self._begun < self._step:
            return
        begin, length = ctypes.c_int64(self._begun), ctypes.c_int64(end - self._begun)
        self._call(descriptor, begin, length, ctypes.c_uint(_WRITE))
        self._begun = end
