"""The interface of attention backends. A backend defines its KV cache's layout, and writes and reads the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from kernels import reference


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The shape of a KV cache: blocks (block 0 is padding and is never read), tokens per block, heads and head size."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class StepMetadata:
    """The data of one step's batch that attention needs. It is built once and used by every layer. Decodes come first.

    Tensors are int64 on the model's device, except cos and sin.
    """

    num_seqs: int
    num_tokens: int
    num_decodes: int  # leading sequences with one new token
    query_lens: list[int]  # new tokens of each sequence
    lengths: list[int]  # tokens of each sequence, including the new ones
    query_start_loc: torch.Tensor  # [num_seqs + 1]
    seq_lens: torch.Tensor  # [num_seqs]
    block_table: torch.Tensor  # [num_seqs, max_blocks]
    slot_mapping: torch.Tensor  # [num_tokens]
    cos: torch.Tensor  # [num_tokens, head_dim / 2], float32
    sin: torch.Tensor
    plan: Any = None  # data of the backend


class AttentionBackend(ABC):
    """Rotary embedding, cache write and paged attention, for all layers of one model."""

    def __init__(self, shape: CacheShape, num_heads: int, scale: float) -> None:
        self.shape = shape
        self.num_heads = num_heads
        self.scale = scale

    def prepare(self, metadata: StepMetadata) -> None:
        """Compute the data that all layers of a step share, and store it in `metadata.plan`. Called once per step."""
        metadata.plan = None

    @abstractmethod
    def pages(self) -> list[torch.Tensor]:
        """Return views of the cache with blocks along the first dimension: [num_blocks, …]."""

    @abstractmethod
    def attend(self, layer: int, qkv: torch.Tensor, metadata: StepMetadata) -> torch.Tensor:
        """Rotate queries and keys, write keys and values to the cache, and return the attention.

        Args:
            layer: index of the layer, from 0.
            qkv: [num_tokens, (num_heads + 2 × num_kv_heads) × head_dim]; may be overwritten.

        Returns:
            [num_tokens, num_heads × head_dim].
        """


class ReferenceBackend(AttentionBackend):
    """The reference implementation in plain PyTorch, for any device."""

    def __init__(self, shape: CacheShape, num_heads: int, scale: float) -> None:
        super().__init__(shape, num_heads, scale)
        pages = (shape.num_layers, shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.key_cache = torch.zeros(pages, dtype=shape.dtype, device=shape.device)
        self.value_cache = torch.zeros_like(self.key_cache)

    def pages(self) -> list[torch.Tensor]:
        return [self.key_cache.transpose(0, 1), self.value_cache.transpose(0, 1)]

    def attend(self, layer: int, qkv: torch.Tensor, metadata: StepMetadata) -> torch.Tensor:
        heads, kv_heads = self.num_heads, self.shape.num_kv_heads
        by_head = qkv.view(len(qkv), -1, self.shape.head_dim)
        query = reference.apply_rope(by_head[:, :heads], metadata.cos, metadata.sin)
        key = reference.apply_rope(by_head[:, heads : heads + kv_heads], metadata.cos, metadata.sin)
        value = by_head[:, heads + kv_heads :]
        keys, values = self.key_cache[layer], self.value_cache[layer]
        reference.write_cache(key, value, keys, values, metadata.slot_mapping)
        out = reference.paged_attention(
            query, keys, values, metadata.block_table, metadata.seq_lens, metadata.query_start_loc, self.scale
        )
        return out.flatten(1)
