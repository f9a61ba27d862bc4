"""Gives memory that glibc keeps after a free back to the system."""

import ctypes
import time
from collections.abc import Callable

EVERY_S = 0.25


def _glibc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # another C library
        return None


class FreedMemory:
    """Batches of many shapes leave holes in the heap of the encoder's thread, which glibc keeps: it grew for as long as
    there was load, while what was in use stayed the same.

    Measured with all-MiniLM-L6-v2 on a CPU: giving the holes back costs 2 % of processor time; mapping every large tensor
    by itself (M_MMAP_THRESHOLD) 15 to 20 %. A server whose batches take less than EVERY_S does it less often than once a
    batch. With another C library nothing is done.
    """

    def __init__(self) -> None:
        self._trim, self._last = _glibc_trim(), time.monotonic()

    def give_back(self) -> None:
        """Between two batches, in the encoder's thread: then the most memory is free."""
        if self._trim is not None and time.monotonic() - self._last >= EVERY_S:
            self._trim(0)
            self._last = time.monotonic()
