"""Helpers for tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

# Maximum numbers per call. On the CPU, float32 temporaries of this size fit into its caches, and the heap provides them
# without system calls.
_CPU_ELEMENTS = 1 << 19
_GPU_ELEMENTS = 1 << 26


def rows_per_call(width: int, device: torch.device, *, factor: int = 1) -> int:
    """Return how many rows of `width` numbers to process in one call, so that memory is bounded. On the CPU the limit
    is
    `factor` times as high."""
    return max(1, (_GPU_ELEMENTS if device.type == "cuda" else _CPU_ELEMENTS * factor) // width)


def upload(
    values: Sequence[int] | Sequence[float] | npt.NDArray[np.int64 | np.float32 | np.uint8],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return `values` as a tensor on `device`, without waiting for queued work of the device."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
