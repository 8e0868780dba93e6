"""The interface of attention backends. A backend defines its KV cache's layout, and writes and reads the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels import reference
from kernels.native.operators import StackAttention


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of one layer.

    scale: factor of the scores, usually head_dim ** −0.5.
    window: a token attends to itself and the `window` − 1 tokens before; 0: to all tokens before.
    soft_cap: scores are limited smoothly to ±soft_cap: soft_cap · tanh(score / soft_cap); 0: no limit.
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A chosen backend: its name, and why it replaces the default ("unsupported", "mismatch", "error" or empty)."""

    name: str
    fallback: str = ""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The shape of a KV cache: blocks (block 0 is padding and is never read), tokens per block, heads and head size.

    A block has places for the keys and values of `num_layers` layers. If layers of several groups use the same blocks,
    `places` has the place of each layer of the model.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    places: tuple[int, ...] = ()  # empty: layer i has place i

    def by_layer(self, pages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the entry of `pages` for each layer, from those of the places."""
        return [pages[place] for place in self.places] if self.places else list(pages)


@dataclass(slots=True)
class StepMetadata:
    """The data of one step's batch that attention needs. It is built once and used by every layer. Decodes come first.

    Tensors are int32 on the model's device.
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
    positions: torch.Tensor  # [num_tokens], from 0 in each sequence
    plan: Any = None  # data of the backend


class AttentionBackend(ABC):
    """Cache write and paged attention, for all layers of one model. `specs` has an entry for each layer."""

    def __init__(self, shape: CacheShape, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        self.shape = shape
        self.num_heads = num_heads
        self.specs = list(specs)

    def prepare(self, metadata: StepMetadata) -> None:
        """Compute the data that all layers of a step share, and store it in `metadata.plan`. Called once per step."""
        metadata.plan = None

    @abstractmethod
    def pages(self) -> list[torch.Tensor]:
        """Return views of the cache with blocks along the first dimension: [num_blocks, …]."""

    @abstractmethod
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: StepMetadata
    ) -> torch.Tensor:
        """Write keys and values to the cache, and return the attention of the queries.

        Args:
            layer: index of the layer, from 0.
            query: [num_tokens, num_heads, head_dim], rotated. As key and value, it may be a view of a wider tensor.
            key, value: [num_tokens, num_kv_heads, head_dim]; keys are rotated.

        Returns:
            [num_tokens, num_heads × head_dim].
        """

    def native(self, _metadata: StepMetadata) -> StackAttention | None:
        """Return the attention of all layers for a call of the C kernels that includes it, or None to call `attend`."""
        return None


class ReferenceBackend(AttentionBackend):
    """The reference implementation in plain PyTorch, for any device."""

    def __init__(self, shape: CacheShape, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        super().__init__(shape, num_heads, specs)
        pages = (shape.num_layers, shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self._keys = torch.zeros(pages, dtype=shape.dtype, device=shape.device)
        self._values = torch.zeros_like(self._keys)
        self.key_cache, self.value_cache = shape.by_layer(self._keys.unbind(0)), shape.by_layer(self._values.unbind(0))

    def pages(self) -> list[torch.Tensor]:
        return [self._keys.transpose(0, 1), self._values.transpose(0, 1)]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: StepMetadata
    ) -> torch.Tensor:
        keys, values, spec = self.key_cache[layer], self.value_cache[layer], self.specs[layer]
        reference.write_cache(key, value, keys, values, metadata.slot_mapping)
        out = reference.paged_attention(
            query, keys, values, metadata.block_table, metadata.seq_lens, metadata.query_start_loc,
            spec.scale, window=spec.window, soft_cap=spec.soft_cap,
        )  # fmt: skip
        return out.flatten(1)
