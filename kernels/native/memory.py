"""Memory in huge pages. With pages of 4 KB, address translation limits how fast a core reads the weights."""

from __future__ import annotations

import contextlib
import mmap
from math import prod

import torch

HUGE_PAGE_BYTES = 2 << 20
MAPPING_BYTES = 64 << 20  # bytes of a mapping that small tensors share
_ALIGNMENT = 64  # a cache line


class HugePages:
    """An allocator of tensors. A mapping is released when its last tensor is freed."""

    def __init__(self) -> None:
        self._mapping = torch.empty(0, dtype=torch.uint8)  # the rest of the current mapping

    def allocate(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor. If its memory is new, the numbers are 0."""
        size = prod(shape) * dtype.itemsize
        whole = -(-size // _ALIGNMENT) * _ALIGNMENT
        if whole > MAPPING_BYTES:
            return _map(whole)[:size].view(dtype).view(shape)
        if whole > len(self._mapping):
            self._mapping = _map(MAPPING_BYTES)
        part, self._mapping = self._mapping[:size], self._mapping[whole:]
        return part.view(dtype).view(shape)


def _map(size: int) -> torch.Tensor:
    """Return new bytes that begin at a huge page. Pages that are never written take no memory."""
    mapping = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel has no huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE_PAGE_BYTES :][:size]
