"""The attention backend of the batch-invariant mode, for any device."""

from __future__ import annotations

import torch

from inference_worker.engine.attention.base import AttentionBackend, CacheShape, StepMetadata
from kernels import cpu, invariant, reference


class InvariantBackend(AttentionBackend):
    """A backend whose result for a token depends only on its sequence, bit by bit: not on chunks, cache hits or the
    batch."""

    def __init__(self, shape: CacheShape, num_heads: int, scale: float) -> None:
        super().__init__(shape, num_heads, scale)
        self._pages = cpu.PageShape(shape.num_blocks, shape.block_size, num_heads, shape.num_kv_heads, shape.head_dim)
        rows = 2 * shape.num_kv_heads * shape.num_blocks
        width = shape.block_size * shape.head_dim
        cache = torch.zeros(shape.num_layers, rows, width, dtype=shape.dtype, device=shape.device)
        self._cache = list(cache.unbind(0))
        self._workspace = invariant.Workspace(self._pages, shape.dtype, shape.device)

    def pages(self) -> list[torch.Tensor]:
        heads = 2 * self.shape.num_kv_heads
        return [layer.view(heads, self.shape.num_blocks, -1).transpose(0, 1) for layer in self._cache]

    def prepare(self, metadata: StepMetadata) -> None:
        metadata.plan = invariant.plan(metadata.query_lens, metadata.lengths, metadata.block_table, self._pages)

    def attend(self, layer: int, qkv: torch.Tensor, metadata: StepMetadata) -> torch.Tensor:
        by_head = qkv.view(len(qkv), -1, self.shape.head_dim)
        turned = self.num_heads + self.shape.num_kv_heads
        rotated = reference.apply_rope(by_head[:, :turned], metadata.cos, metadata.sin)
        new = torch.cat((rotated[:, self.num_heads :], by_head[:, turned:]), dim=1)
        # A weight of 0 does not keep out what is not finite: it must not lie where others' keys may come to lie.
        cpu.write(new.nan_to_num_(), self._cache[layer], metadata.slot_mapping)
        query = rotated[:, : self.num_heads]
        return invariant.attend(query, self._cache[layer], metadata.plan, self._pages, self.scale, self._workspace)
