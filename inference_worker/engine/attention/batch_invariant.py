"""The attention backend of the batch-invariant mode, for any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inference_worker.engine.attention.base import AttentionBackend, AttentionSpec, CacheShape, StepMetadata, new_cache
from kernels import cpu, invariant


class InvariantBackend(AttentionBackend):
    """A backend whose result for a token depends only on its sequence, bit by bit: not on chunks, cache hits or the
    batch."""

    def __init__(self, shape: CacheShape, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        super().__init__(shape, num_heads, specs)
        self._pages = cpu.PageShape(shape.num_blocks, shape.block_size, num_heads, shape.num_kv_heads, shape.head_dim)
        rows = 2 * shape.num_kv_heads * shape.num_blocks
        width = shape.block_size * shape.head_dim
        cache = new_cache(shape.num_layers, rows, width, dtype=shape.dtype, device=shape.device)
        self._memory = cache.unbind(0)
        self._cache = shape.by_layer(self._memory)
        self._workspace = invariant.Workspace(self._pages, shape.dtype, shape.device)

    def pages(self) -> list[torch.Tensor]:
        heads = 2 * self.shape.num_kv_heads
        return [layer.view(heads, self.shape.num_blocks, -1).transpose(0, 1) for layer in self._memory]

    def prepare(self, metadata: StepMetadata) -> None:
        metadata.plan = {}  # by window

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: StepMetadata
    ) -> torch.Tensor:
        pages, window, spec = self._cache[layer], self.specs[layer].window, self.specs[layer]
        if window not in metadata.plan:
            query_lens, lengths, table = metadata.query_lens, metadata.lengths, metadata.block_table
            metadata.plan[window] = invariant.plan(query_lens, lengths, table, self._pages, window=window)
        # A weight of 0 does not keep out what is not finite: it must not lie where others' keys may come to lie.
        cpu.write(key.nan_to_num(), value.nan_to_num(), pages, metadata.slot_mapping)
        return invariant.attend(
            query, pages, metadata.plan[window], self._pages, spec.scale, self._workspace, soft_cap=spec.soft_cap
        )
