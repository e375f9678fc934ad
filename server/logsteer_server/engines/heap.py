"""How the C library keeps memory that is freed, in an engine's process."""

import ctypes
import os

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""The C library's numbers of the two bounds, in `malloc.h`."""
LARGEST_KEPT = 32 * 2**20
"""Bytes of a piece of memory that is used again once it is freed; the most that glibc takes."""
MOST_KEPT = 256 * 2**20
"""Bytes that may lie free at the end of the heap before they go back to the system."""
OWN_BOUNDS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables by which whoever starts the server sets bounds of their own, which then hold."""


def keep_freed_memory() -> None:
    """Have glibc use freed memory again instead of giving it back to the system at once.

    A step that reads columns makes temporaries of a few MiB. Given back and taken anew in every
    step, each of their pages is filled with zeros by the system before it is written. Does nothing
    with another C library, and where the environment sets the bounds.
    """
    if any(name in os.environ for name in OWN_BOUNDS):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(TRIM_THRESHOLD, MOST_KEPT)
