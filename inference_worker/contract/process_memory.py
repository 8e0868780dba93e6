"""The memory of this process: settings of the C library's allocator (glibc only), and the release of unused pages."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

# Numbers from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_MAPPINGS = Path("/proc/self/smaps")
_STEP_BYTES, _LOAD_BYTES = 2**25, 2**20  # smallest objects with a mapping of their own, in steps and in loads
_reuses_memory = threading.Event()


def return_freed_memory() -> None:
    """Make the allocator return the memory of large objects once they are freed.

    By default glibc raises its thresholds when large objects are freed. Request bodies of 2 MB then come from the heap,
    which keeps hundreds of MB after a burst.
    """
    _set(mmap_threshold=2**17, trim_threshold=2**20)


def reuse_freed_memory() -> None:
    """Make the allocator reuse the memory of a step's tensors, without an arena for each thread.

    By default each thread may get an arena of 64 MB, and the heap keeps what the load of a model has freed.
    """
    _reuses_memory.set()
    _set(mmap_threshold=_STEP_BYTES, trim_threshold=2**26)


@contextlib.contextmanager
def return_large_objects() -> Iterator[None]:
    """Make the allocator return the memory of objects of 1 MB and more in the context, for loads of models.

    Copies of a load's matrices then leave no pages in the heap, which grew by up to 45 MB, depending on where the
    allocator placed them. It has an effect only after `reuse_freed_memory`.
    """
    if not _reuses_memory.is_set():
        yield
        return
    _set_option(_MMAP_THRESHOLD, _LOAD_BYTES)
    try:
        yield
    finally:
        _set_option(_MMAP_THRESHOLD, _STEP_BYTES)


def trim_heap() -> None:
    """Return the heap's free memory to the system. Loading a tokenizer leaves several MB."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def release_code() -> None:
    """Release the pages of libraries' code and constants, most of which are used only while the process starts.

    The kernel maps a page again when it is used. Only mappings without changed pages are released, so nothing is lost.
    """
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        start = size = 0
        for line in _MAPPINGS.read_text(encoding="utf-8", errors="replace").splitlines():
            name, *values = line.split()
            if not name.endswith(":"):
                start, end = (int(address, 16) for address in name.split("-"))
                is_constant = "w" not in values[0] and values[-1].startswith("/")
                size = end - start if is_constant else 0
            elif name == "Anonymous:" and values[0] == "0" and size:  # no page was changed before it became read-only
                madvise(start, size, mmap.MADV_DONTNEED)


def _set(*, mmap_threshold: int, trim_threshold: int) -> None:
    _set_option(_ARENA_MAX, 2)
    _set_option(_MMAP_THRESHOLD, mmap_threshold)
    _set_option(_TRIM_THRESHOLD, trim_threshold)


def _set_option(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(option, value)
