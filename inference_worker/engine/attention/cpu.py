"""The attention backend for the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inference_worker.engine.attention.base import AttentionBackend, CacheShape, StepMetadata
from kernels import cpu


@dataclass(frozen=True, slots=True)
class _Plan:
    groups: list[cpu.AttentionGroup]
    cos: torch.Tensor  # [num_tokens, heads, head_dim]: the rotation of queries and keys, and none for values
    sin: torch.Tensor  # the same, with the signs of rotation by halves


class CpuBackend(AttentionBackend):
    """A backend with few, large operations, because each operation of each layer has a fixed cost."""

    def __init__(self, shape: CacheShape, num_heads: int, scale: float) -> None:
        super().__init__(shape, num_heads, scale)
        self._pages = cpu.PageShape(shape.num_blocks, shape.block_size, num_heads, shape.num_kv_heads, shape.head_dim)
        rows = 2 * shape.num_kv_heads * shape.num_blocks
        cache = torch.zeros(shape.num_layers, rows, shape.block_size * shape.head_dim, dtype=shape.dtype)
        self._cache = list(cache.unbind(0))
        self._workspace = torch.empty(0, dtype=shape.dtype)

    def pages(self) -> list[torch.Tensor]:
        heads = 2 * self.shape.num_kv_heads
        return [layer.view(heads, self.shape.num_blocks, -1).transpose(0, 1) for layer in self._cache]

    def prepare(self, metadata: StepMetadata) -> None:
        dtype, kv_heads = self.shape.dtype, self.shape.num_kv_heads
        groups = cpu.plan(metadata.query_lens, metadata.lengths, metadata.block_table, self._pages, dtype)
        needed = cpu.workspace_size(groups, self._pages)
        if needed > self._workspace.numel():
            self._workspace = torch.empty(needed + needed // 4, dtype=dtype)
        # Values go through the same operations as queries and keys, with a rotation by zero.
        turned = (metadata.num_tokens, self.num_heads + kv_heads, self.shape.head_dim)
        still = (metadata.num_tokens, kv_heads, self.shape.head_dim)
        cos = torch.cat((metadata.cos, metadata.cos), dim=-1).to(dtype)[:, None].expand(turned)
        sin = torch.cat((-metadata.sin, metadata.sin), dim=-1).to(dtype)[:, None].expand(turned)
        metadata.plan = _Plan(
            groups,
            torch.cat((cos, torch.ones(still, dtype=dtype)), dim=1),
            torch.cat((sin, torch.zeros(still, dtype=dtype)), dim=1),
        )

    def attend(self, layer: int, qkv: torch.Tensor, metadata: StepMetadata) -> torch.Tensor:
        plan: _Plan = metadata.plan
        pages = self._cache[layer]
        by_head = qkv.view(len(qkv), -1, self.shape.head_dim)
        half = self.shape.head_dim // 2
        by_head = torch.addcmul(by_head * plan.cos, torch.roll(by_head, half, -1), plan.sin)
        cpu.write(by_head[:, self.num_heads :], pages, metadata.slot_mapping)
        query = by_head[:, : self.num_heads]
        return cpu.attend(query, pages, plan.groups, self._pages, self.scale, self._workspace)
