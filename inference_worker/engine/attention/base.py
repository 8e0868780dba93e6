"""The interface of attention backends. A backend defines its KV cache's layout, and writes and reads the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import torch

from inference_worker.contract.engine_config import KVCacheDTypeName
from kernels import reference
from kernels.native.library import Library
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
    kv_dtype: KVCacheDTypeName = "auto"  # dtype of the stored keys and values; auto: dtype
    kernels: Library | None = None  # the C kernels, if the model uses them

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


def new_cache(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros. On the CPU, a page of memory is taken when it is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = prod(shape) * dtype.itemsize
    return torch.frombuffer(mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS), dtype=dtype).view(shape)


class ReferenceBackend(AttentionBackend):
    """The reference implementation in plain PyTorch, for any device."""

    def __init__(self, shape: CacheShape, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        super().__init__(shape, num_heads, specs)
        pages = (shape.num_layers, shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        dtype = {"auto": shape.dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[shape.kv_dtype]
        stored = torch.uint8 if shape.kv_dtype == "fp8" else dtype
        self._parts = [new_cache(*pages, dtype=stored, device=shape.device) for _ in range(2)]  # keys, values
        if shape.kv_dtype == "int8":  # and of the scales of both
            scales = (*pages[:-1], shape.head_dim // reference.KV_GROUP)
            self._parts += [new_cache(*scales, dtype=torch.bfloat16, device=shape.device) for _ in range(2)]
        self._caches = [shape.by_layer(part.unbind(0)) for part in self._parts]

    def pages(self) -> list[torch.Tensor]:
        return [part.transpose(0, 1) for part in self._parts]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: StepMetadata
    ) -> torch.Tensor:
        caches, spec = [cache[layer] for cache in self._caches], self.specs[layer]
        table = metadata.block_table
        if self.shape.kv_dtype == "auto":
            keys, values = caches
            reference.write_cache(key, value, keys, values, metadata.slot_mapping)
        else:
            blocks, table = torch.unique(table, return_inverse=True)
            keys, values = self._write_and_convert(caches, key, value, metadata.slot_mapping, blocks.long())
        out = reference.paged_attention(
            query, keys, values, table, metadata.seq_lens, metadata.query_start_loc,
            spec.scale, window=spec.window, soft_cap=spec.soft_cap,
        )  # fmt: skip
        return out.flatten(1)

    def _write_and_convert(
        self, caches: Sequence[torch.Tensor], key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor,
        blocks: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Write keys and values in 8 bits, and return those of the blocks in the dtype."""
        dtype = self.shape.dtype
        if self.shape.kv_dtype == "fp8":
            key, value = (reference.to_fp8(each).view(torch.uint8) for each in (key, value))
            reference.write_cache(key, value, caches[0], caches[1], slots)
            found = [cache[blocks].view(torch.float8_e4m3fn).to(dtype) for cache in caches]
            return found[0], found[1]
        (key, key_scales), (value, value_scales) = reference.quantize_kv(key), reference.quantize_kv(value)
        reference.write_cache(key, value, caches[0], caches[1], slots)
        reference.write_cache(key_scales, value_scales, caches[2], caches[3], slots)
        chosen = [cache[blocks] for cache in caches]
        return tuple(reference.dequantize_kv(chosen[i], chosen[i + 2], dtype) for i in range(2))  # type: ignore[return-value]
