"""Copies between host and device that do not wait for queued work of the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

# Maximum numbers per call. On the CPU, float32 temporaries of this size fit into its caches, and the heap provides them
# without system calls.
_CPU_ELEMENTS = 1 << 19
_GPU_ELEMENTS = 1 << 26
_ALIGNMENT = 16  # bytes; Triton compiles a kernel again for a pointer of another alignment


def rows_per_call(width: int, device: torch.device, *, factor: int = 1) -> int:
    """Return how many rows of `width` numbers to process in one call, so that memory is bounded. On the CPU the limit
    is
    `factor` times as high."""
    return max(1, (_GPU_ELEMENTS if device.type == "cuda" else _CPU_ELEMENTS * factor) // width)


def upload(
    values: Sequence[int] | Sequence[float] | Array, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return `values` as a tensor on `device`."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def upload_all(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Return the arrays as tensors on `device`: views of one buffer, which is copied once. The arrays must not change
    afterwards."""
    if device.type != "cuda":
        return [torch.from_numpy(array) for array in arrays]
    buffer = torch.empty(packed_size(arrays), dtype=torch.uint8, pin_memory=True)
    pack(arrays, buffer)
    return unpack(buffer.to(device, non_blocking=True), arrays)


def packed_size(arrays: Sequence[Array]) -> int:
    """Return the bytes of the buffer that `pack` fills."""
    return sum(_align(array.nbytes) for array in arrays)


def pack(arrays: Sequence[Array], buffer: torch.Tensor) -> None:
    """Copy the arrays to `buffer`, uint8 [packed_size(arrays)], one after the other."""
    flat, at = buffer.numpy(), 0
    for array in arrays:
        flat[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at += _align(array.nbytes)


def unpack(buffer: torch.Tensor, arrays: Sequence[Array]) -> list[torch.Tensor]:
    """Return views of `buffer` in the dtypes and shapes of the arrays that `pack` copied to it."""
    views, at = [], 0
    for array in arrays:
        dtype = torch.from_numpy(array[:0]).dtype
        views.append(buffer[at : at + array.nbytes].view(dtype).view(array.shape))
        at += _align(array.nbytes)
    return views


def download(tensor: torch.Tensor) -> torch.Tensor:
    """Start a copy of `tensor` to host memory and return it. It can be read after a later `mark` was waited for.

    A tensor in host memory is returned itself.
    """
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def mark(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until the device has done the work queued so far, and not for later work."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
