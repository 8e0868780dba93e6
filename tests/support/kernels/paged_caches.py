"""Random paged caches for the attention tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_SIZE = 16


@dataclass
class Paged:
    """Sequences in a paged cache. Memory that no sequence owns is NaN, so reading it would show in the output."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor


def paged(lengths: list[int], num_kv_heads: int, head_dim: int, seed: int = 0) -> Paged:
    """Return a cache with sequences of these lengths in shuffled blocks."""
    generator = torch.Generator().manual_seed(seed)
    per_seq = [-(-length // BLOCK_SIZE) for length in lengths]
    num_blocks = sum(per_seq) + 1
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    shape = (num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
    key_cache, value_cache = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
    # Unused entries refer to block 0, which contains only NaN.
    table = torch.zeros(len(lengths), max(1, *per_seq), dtype=torch.int32)
    for row, length in enumerate(lengths):
        blocks = [order.pop() for _ in range(per_seq[row])]
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(length):
            block = blocks[position // BLOCK_SIZE]
            for part in (key_cache, value_cache):
                part[block, position % BLOCK_SIZE] = torch.randn(num_kv_heads, head_dim, generator=generator)
    return Paged(key_cache, value_cache, table, torch.tensor(lengths, dtype=torch.int32))
