"""The attention backend on the C kernels, for bfloat16 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inference_worker.engine.attention.base import AttentionBackend, AttentionSpec, CacheShape, StepMetadata
from kernels.native import operators


class NativeBackend(AttentionBackend):
    """A backend with one call per layer. It is batch-invariant: splits of keys are counted from position 0, and each
    number is computed by the same operations whatever the batch."""

    def __init__(self, shape: CacheShape, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        super().__init__(shape, num_heads, specs)
        library = shape.kernels
        if library is None:
            raise ValueError("attention backend native needs the C kernels; set attention to auto")
        self._library = library
        numbers, self._dtype = 2 * shape.num_kv_heads * shape.block_size * shape.head_dim, shape.dtype
        if shape.kv_dtype == "int8":
            numbers = operators.int8_block_bytes(shape.num_kv_heads, shape.head_dim, shape.block_size)
            self._dtype = torch.int8
        # New pages are 0. Without a write, they take memory only when a block is used.
        pages = library.memory.allocate(shape.num_layers, shape.num_blocks, numbers, dtype=self._dtype)
        self._pages = list(pages.unbind(0))
        self._cache = shape.by_layer(self._pages)
        self._caches = [
            operators.LayerCache(pages, spec.scale, spec.window, spec.soft_cap)
            for pages, spec in zip(self._cache, specs, strict=True)
        ]

    def pages(self) -> list[torch.Tensor]:
        return self._pages

    def prepare(self, metadata: StepMetadata) -> None:
        shape = self.shape
        metadata.plan = operators.AttentionStep(
            self._library, self.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size,
            metadata.query_start_loc, metadata.seq_lens, metadata.block_table, metadata.slot_mapping, self._dtype,
        )  # fmt: skip

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: StepMetadata
    ) -> torch.Tensor:
        plan: operators.AttentionStep = metadata.plan
        spec = self.specs[layer]
        return plan.attend(query, key, value, self._cache[layer], spec.scale, spec.window, spec.soft_cap)

    def native(self, metadata: StepMetadata) -> operators.StackAttention:
        return operators.StackAttention(self._caches, [metadata.plan] * len(self._caches))


def find_native_limit(shape: CacheShape) -> str:
    """Return the property of a cache that the backend does not support, or an empty text."""
    if shape.device.type != "cpu" or shape.dtype != torch.bfloat16:
        return f"{shape.dtype} on {shape.device.type}"
    if shape.kernels is None:
        return "a machine without the C kernels"
    if shape.kv_dtype == "fp8":
        return "a KV cache in fp8"
    if shape.head_dim % operators.UNIT or shape.head_dim > operators.MAX_HEAD_DIM:
        return f"head_dim {shape.head_dim}"
    return f"block_size {shape.block_size}" if shape.block_size % operators.UNIT else ""
