"""The attention backend for the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inference_worker.engine.attention.base import AttentionBackend, AttentionSpec, CacheShape, StepMetadata, new_cache
from kernels import cpu


class CpuBackend(AttentionBackend):
    """A backend with few, large operations, because each operation of each layer has a fixed cost."""

    def __init__(self, shape: CacheShape, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        super().__init__(shape, num_heads, specs)
        self._pages = cpu.PageShape(shape.num_blocks, shape.block_size, num_heads, shape.num_kv_heads, shape.head_dim)
        rows = 2 * shape.num_kv_heads * shape.num_blocks
        width = shape.block_size * shape.head_dim
        cache = new_cache(shape.num_layers, rows, width, dtype=shape.dtype, device=shape.device)
        self._memory = cache.unbind(0)
        self._cache = shape.by_layer(self._memory)
        self._workspace = torch.empty(0, dtype=shape.dtype)

    def pages(self) -> list[torch.Tensor]:
        heads = 2 * self.shape.num_kv_heads
        return [layer.view(heads, self.shape.num_blocks, -1).transpose(0, 1) for layer in self._memory]

    def prepare(self, metadata: StepMetadata) -> None:
        metadata.plan = {}  # by window

    def _plan(self, metadata: StepMetadata, window: int) -> list[cpu.AttentionGroup]:
        groups: list[cpu.AttentionGroup] | None = metadata.plan.get(window)
        if groups is None:
            dtype, pages, table = self.shape.dtype, self._pages, metadata.block_table
            groups = cpu.plan(metadata.query_lens, metadata.lengths, table, pages, dtype, window=window)
            needed = cpu.workspace_size(groups, pages)
            if needed > self._workspace.numel():
                self._workspace = torch.empty(needed + needed // 4, dtype=dtype)
            metadata.plan[window] = groups
        return groups

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: StepMetadata
    ) -> torch.Tensor:
        pages, spec = self._cache[layer], self.specs[layer]
        cpu.write(key, value, pages, metadata.slot_mapping)
        groups = self._plan(metadata, spec.window)
        return cpu.attend(query, pages, groups, self._pages, spec.scale, self._workspace, soft_cap=spec.soft_cap)
