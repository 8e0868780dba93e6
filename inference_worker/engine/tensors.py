"""Small helpers around tensors that several parts of a step need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

# Numbers worked on at once. On the CPU, float32 temporaries of this size stay in its caches, and come from the heap and
# not, page by page, from the system.
_CPU_ELEMENTS = 1 << 19
_GPU_ELEMENTS = 1 << 26


def rows_at_once(width: int, device: torch.device, *, factor: int = 1) -> int:
    """Rows of `width` numbers to work on at once, so that memory is bounded; on the CPU `factor` times as many."""
    return max(1, (_GPU_ELEMENTS if device.type == "cuda" else _CPU_ELEMENTS * factor) // width)


def upload(
    values: Sequence[int] | Sequence[float] | npt.NDArray[np.int64 | np.float32 | np.uint8],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`values` as a tensor on `device`. The host does not wait for work that is queued there."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
