"""Prefill attention: causal attention of prompt chunks over a paged prefix, several sequences in one launch.

The cache contains the chunk's keys, so every key is read through the block table. The query heads that share a KV head
and their tokens are one tile, which is efficient for short chunks (draft verification) as well as long ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.checks import LOG2_E, require, require_cache, require_dtype, require_heads
from kernels.triton.tile import attend_tile, first_tile, tile_blocks


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tile sizes and launch shape of the prefill kernel. `tile_rows`: query tokens × heads that share a KV head."""

    tile_rows: int
    tile_keys: int
    num_warps: int
    num_stages: int


def prefill_config(max_query_len: int, group: int, head_dim: int) -> PrefillConfig:
    """Return tile sizes for chunks of at most `max_query_len` tokens with `group` query heads per KV head.

    wgmma needs 64 rows per warpgroup: 128 rows use 8 warps. Small chunks (drafts) use small tiles.
    """
    rows = max_query_len * group
    if rows <= 32 and group <= 16:
        return PrefillConfig(16 if rows <= 16 else 32, 64, 4, 3)
    if head_dim > 128:
        return PrefillConfig(64, 32, 4, 2)
    if rows <= 64:
        return PrefillConfig(64, 64, 4, 3)
    return PrefillConfig(128, 64, 8, 3)


@triton.jit
def _find_sequence(
    query_start_ptr: tl.tensor, num_seqs: tl.tensor, tile: tl.tensor, tile_tokens: tl.constexpr
) -> tl.tensor:
    """Return the sequence of a tile.

    Sequence i's tiles start at query_start[i] // tile_tokens + i, which is enough for any lengths.
    """
    found = 0
    for first in range(0, num_seqs, 128):
        index = first + tl.arange(0, 128)
        start = tl.load(query_start_ptr + index, mask=index < num_seqs, other=0)
        begun = (index < num_seqs) & (start // tile_tokens + index <= tile)
        found += tl.sum(begun.to(tl.int32), 0)
    return found - 1


@triton.jit(do_not_specialize=["num_seqs"])
def _prefill_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_seqs: tl.tensor,
    scale_log2: tl.tensor,
    query_stride: tl.tensor,
    out_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    table_stride: tl.tensor,
    group: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    tile_dim: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    window: tl.constexpr,
    soft_cap: tl.constexpr,
) -> None:
    """Compute `tile_rows // group` consecutive tokens of one sequence for one KV head in one program."""
    tile_tokens: tl.constexpr = tile_rows // group
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles see the most keys: start them first
    kv_head = tl.program_id(1)
    seq = _find_sequence(query_start_ptr, num_seqs, tile, tile_tokens)
    query_begin = tl.load(query_start_ptr + seq).to(tl.int32)
    query_len = tl.load(query_start_ptr + seq + 1).to(tl.int32) - query_begin
    first = (tile - query_begin // tile_tokens - seq) * tile_tokens
    if first >= query_len:
        return  # an unused tile between two sequences
    seq_len = tl.load(seq_lens_ptr + seq).to(tl.int32)
    first_position = seq_len - query_len + first

    rows = tl.arange(0, tile_rows)
    dims = tl.arange(0, tile_dim)
    token = first + rows // group
    valid = (token < query_len) & (rows < tile_tokens * group)
    index = (query_begin + token).to(tl.int64)
    column = (kv_head * group + rows % group)[:, None] * head_dim + dims[None, :]
    used = valid[:, None] & (dims < head_dim)[None, :]
    query = tl.load(query_ptr + index[:, None] * query_stride + column, mask=used, other=0.0)
    last_key = first_position + rows // group
    acc = tl.zeros([tile_rows, tile_dim], tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    top = tl.full([tile_rows], float("-inf"), tl.float32)
    table = table_ptr + seq.to(tl.int64) * table_stride
    keys = key_ptr + kv_head * head_dim
    values = value_ptr + kv_head * head_dim

    # Every row sees all keys up to the first row's position. Only the later tiles need a mask.
    low = first_tile(first_position, window, tile_keys)
    seen_by_all = low  # with a window, all tiles need one
    if window == 0:
        seen_by_all = (first_position + 1) // tile_keys * tile_keys
    block = tile_blocks(table, low, seq_len, block_size, tile_keys)
    for start in range(low, seen_by_all, tile_keys):
        next_block = tile_blocks(table, start + tile_keys, seq_len, block_size, tile_keys)
        acc, total, top = attend_tile(
            acc, total, top, query, last_key, start, seq_len, block, keys, values,
            block_stride, token_stride, scale_log2, block_size, head_dim, tile_dim, tile_keys, False, 0, soft_cap,
        )  # fmt: skip
        block = next_block
    end = tl.minimum(first_position + tile_tokens, seq_len)
    for start in range(seen_by_all, end, tile_keys):
        next_block = tile_blocks(table, start + tile_keys, seq_len, block_size, tile_keys)
        acc, total, top = attend_tile(
            acc, total, top, query, last_key, start, seq_len, block, keys, values,
            block_stride, token_stride, scale_log2, block_size, head_dim, tile_dim, tile_keys, True, window, soft_cap,
        )  # fmt: skip
        block = next_block
    result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + index[:, None] * out_stride + column, result, mask=used)


def paged_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    max_query_len: int,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    out: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    """Compute the causal attention of each sequence's newest tokens over its whole sequence. The cache contains their
    keys.

    Args:
        query: [num_tokens, num_heads, head_dim], the sequences' new tokens one after another; the row stride is free.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], dtype of `query` or float8_e4m3fn.
        block_table: int32 or int64 [num_seqs, max_blocks]: the cache block of each block_size tokens; the rest is not
            read.
        seq_lens: int32 or int64 [num_seqs], in tokens, including the new ones; at least the number of new ones.
        query_start_loc: int32 or int64 [num_seqs + 1]: start of each sequence's tokens in `query`; from 0 to at most
            num_tokens. Later rows (padding) are not written in `out`.
        scale: factor of the scores, usually head_dim ** −0.5; above 0.
        window: tokens that a token attends to, itself included; 0: all.
        soft_cap: c, if above 0: scores become c · tanh(score / c).
        max_query_len: upper bound of a sequence's new tokens; it only determines tile sizes.
        out: [num_tokens, num_heads, head_dim]; the row stride is free; allocated if not given.
        config: tile sizes; by default those of `prefill_config`.

    Raises:
        ValueError, TypeError: a shape, stride or dtype is not as above. Values on the device are not checked.
    """
    require_cache(query, key_cache, value_cache)
    for name, tensor in (("block_table", block_table), ("seq_lens", seq_lens), ("query_start_loc", query_start_loc)):
        require_dtype(name, tensor, torch.int32, torch.int64)
        require(tensor.stride(-1) == 1, f"{name} must be contiguous in its last dimension")
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    (num_seqs,) = seq_lens.shape
    require(query_start_loc.shape == (num_seqs + 1,), f"query_start_loc must be [{num_seqs + 1}]")
    require(block_table.ndim == 2 and len(block_table) == num_seqs, f"block_table must have {num_seqs} rows")
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    require(out.shape == query.shape, "out must be shaped like query")
    require_heads("out", out, 3)
    if num_tokens == 0 or num_seqs == 0:
        return out
    group = num_heads // num_kv_heads
    config = config or prefill_config(max_query_len, group, head_dim)
    require(config.tile_rows >= group, f"a tile of {config.tile_rows} rows cannot hold {group} heads")
    tiles = num_tokens // (config.tile_rows // group) + num_seqs
    _prefill_kernel[(tiles, num_kv_heads)](
        query, key_cache, value_cache, block_table, seq_lens, query_start_loc, out, num_seqs,
        scale * LOG2_E, query.stride(0), out.stride(0), key_cache.stride(0), key_cache.stride(1), block_table.stride(0),
        group=group, block_size=block_size, head_dim=head_dim, tile_dim=triton.next_power_of_2(head_dim),
        tile_rows=config.tile_rows, tile_keys=config.tile_keys,
        window=window, soft_cap=soft_cap, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
