"""Settings of the C library's allocator that return freed memory to the operating system (glibc only)."""

from __future__ import annotations

import contextlib
import ctypes

# Numbers from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def return_freed_memory() -> None:
    """Make the allocator return the memory of large objects once they are freed.

    By default glibc raises its thresholds when large objects are freed. Request bodies of 2 MB then come from the heap,
    which keeps hundreds of MB after a burst.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_ARENA_MAX, 2)
        mallopt(_MMAP_THRESHOLD, 2**17)
        mallopt(_TRIM_THRESHOLD, 2**20)


def trim_heap() -> None:
    """Return the heap's free memory to the system. Loading a tokenizer leaves several MB."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
