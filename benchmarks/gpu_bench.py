"""Timing on a GPU by replays of CUDA graphs, and the machine's reference rates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cached_property

import torch


class Bench:
    """The device and the timer of the sections. A dry run uses the CPU and float32, runs once, and its times are
    meaningless."""

    def __init__(self, *, dry_run: bool, seconds_left: Callable[[], float]) -> None:
        self.dry_run = dry_run
        self.seconds_left = seconds_left
        self.device = torch.device("cpu" if dry_run else "cuda")
        self.dtype = torch.float32 if dry_run else torch.bfloat16
        self.num_sms = 4 if dry_run else torch.cuda.get_device_properties(0).multi_processor_count

    def random(self, *shape: int) -> torch.Tensor:
        """Return normal random numbers on the device, in the run's dtype."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the device time of one call in seconds: the median of replays of a CUDA graph."""
        if self.dry_run:
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # warm-up off the main stream, as captures want it
            call()
            stream.synchronize()
            begin = time.perf_counter()
            call()
            stream.synchronize()
            once = time.perf_counter() - begin
        repeats = max(1, min(100, int(0.01 / once)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                call()
        graph.replay()
        times = []
        for _ in range(5 if once < 0.05 else 3):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 1e3 / repeats)
        return float(statistics.median(times))

    @cached_property
    def copy_rate(self) -> float:
        """Return the rate of a large copy on the device, in bytes read and written per second."""
        size = 1 << 16 if self.dry_run else 4 << 30
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / self.seconds(lambda: target.copy_(source))

    @cached_property
    def matrix_rate(self) -> float:
        """Return the floating-point operations per second of a large bf16 matrix product of random numbers."""
        size = 64 if self.dry_run else 8192
        a, b = self.random(size, size), self.random(size, size)
        return 2 * size**3 / self.seconds(lambda: a @ b)
