"""The peak rates of a device, measured in a moment at start. They are the reference of MFU and bandwidth use."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from inference_worker.engine.capacity.roofline import Peaks
from inference_worker.engine.compute_path import is_fast_in_pytorch

_SECONDS = 0.06  # for each measurement, of at least three runs
_SIDE = {"cpu": 1024, "cuda": 8192}  # rows of the square matrices
_COPIED = {"cpu": 48 << 20, "cuda": 1 << 30}  # bytes: more than any cache of the CPU


@cache
def measure_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """Return the rates of a large matrix product in `dtype` and of a large copy, with PyTorch's current threads.

    On a CPU without products in a 16-bit type, the product is in float32, as in the C kernels there. The rates are
    measured once per process, device and dtype. If other processes use the machine, they are too low.
    """
    side, size = _SIDE[device.type], _COPIED[device.type]
    if device.type == "cpu" and not is_fast_in_pytorch(dtype):
        dtype = torch.float32
    left = torch.ones(side, side, dtype=dtype, device=device)
    product = torch.empty_like(left)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    flops = 2 * side**3 / _measure_fastest(lambda: torch.mm(left, left, out=product), device)
    bandwidth = 2 * size / _measure_fastest(lambda: target.copy_(source), device)
    return Peaks(flops, bandwidth)


def _measure_fastest(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest run."""
    best, begun, goes = float("inf"), time.perf_counter(), 0
    while goes < 3 or time.perf_counter() - begun < _SECONDS:
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
        goes += 1
    return best
