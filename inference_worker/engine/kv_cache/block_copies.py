"""Copies of whole KV cache blocks: between blocks, and between the device and CPU memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby

import torch

from inference_worker.engine.sequences.step import BlockOperation
from inference_worker.engine.tensors import upload

_TRIALS = 3


class BlockCopies:
    """The copies of a step's block operations, in order, on the device's stream.

    Args:
        pages: views of the KV cache, [num_blocks, …]; a block's content is its row in all of them.
        num_host_blocks: blocks of CPU memory for offloaded content.
    """

    def __init__(self, pages: Sequence[torch.Tensor], num_host_blocks: int) -> None:
        self._pages = pages
        cuda = pages[0].device.type == "cuda"
        self._host = [
            torch.empty((num_host_blocks, *page.shape[1:]), dtype=page.dtype, pin_memory=cuda) for page in pages
        ]
        self.restore_seconds = self._time_restore() if num_host_blocks else 0.0  # for one block

    def run(self, operations: Sequence[BlockOperation]) -> None:
        # Consecutive operations of one type can run as one copy: all reads precede all writes.
        for operation_type, same_type in groupby(operations, key=lambda operation: operation.operation_type):
            _, sources, targets = zip(*same_type, strict=True)
            if operation_type == "save":
                self._save(sources, targets)
            elif operation_type == "restore":
                self._restore(sources, targets)
            else:
                self._copy(sources, targets)

    def _copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for page in self._pages:
            page.index_copy_(0, _index(targets, page), page.index_select(0, _index(sources, page)))

    def _save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        for page, host in zip(self._pages, self._host, strict=True):
            gathered = page.index_select(0, _index(blocks, page))
            for row, slot in zip(gathered, slots, strict=True):
                host[slot].copy_(row, non_blocking=True)

    def _restore(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        # The device reads host memory itself, in order after the saves, so the host need not wait for them.
        for page, host in zip(self._pages, self._host, strict=True):
            restored = torch.empty((len(slots), *page.shape[1:]), dtype=page.dtype, device=page.device)
            for row, slot in zip(restored, slots, strict=True):
                row.copy_(host[slot], non_blocking=True)
            page.index_copy_(0, _index(blocks, page), restored)

    def _time_restore(self) -> float:
        """Return the seconds to restore one block: the minimum of several restores to block 0, which is never read."""
        best = float("inf")
        for _ in range(_TRIALS):
            started = time.perf_counter()
            self._restore([0], [0])
            if self._pages[0].device.type == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - started)
        for page in self._pages:
            page[0].zero_()
        return best


def _index(values: Sequence[int], page: torch.Tensor) -> torch.Tensor:
    return upload(values, page.device)
