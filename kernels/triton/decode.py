"""Decode attention: one new token per sequence over the paged KV cache, with the keys split over programs.

The query heads that share a KV head are one tile, so the cache is read once. The grid depends only on the plan and the
batch, not on the sequences' lengths, so a CUDA graph can contain the launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.checks import LOG2_E, require, require_cache, require_dtype
from kernels.triton.tile import attend_tile, first_tile, tile_blocks

TILE_KEYS = 64  # keys a program reads at a time; splits are multiples of it
COMBINE_SPLITS = 16  # partial results combined per iteration, whatever the number of splits
MAX_SPLITS = 64
PROGRAMS_PER_SM = 3  # concurrent programs per multiprocessor (limited by shared memory)


@triton.jit
def _split_length(
    seq_len: tl.tensor, num_splits: tl.tensor, split_tokens: tl.tensor, tile_keys: tl.constexpr
) -> tl.tensor:
    """Return the keys of each split except the last: `split_tokens`, or an even share in whole tiles if it is 0."""
    even = tl.cdiv(tl.cdiv(seq_len, num_splits), tile_keys) * tile_keys
    return tl.where(split_tokens > 0, split_tokens, even)


@triton.jit(do_not_specialize=["num_splits", "split_tokens"])
def _decode_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [num_seqs, num_heads, head_dim], used with one split
    partial_ptr: tl.tensor,  # [num_seqs, num_heads, num_splits, head_dim] float32, used with several splits
    lse_ptr: tl.tensor,  # [num_seqs, num_heads, num_splits] float32: log2 of the sum of exponentials
    scale_log2: tl.tensor,
    query_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    table_stride: tl.tensor,
    num_splits: tl.tensor,
    split_tokens: tl.tensor,
    group: tl.constexpr,
    tile_rows: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    tile_dim: tl.constexpr,
    tile_keys: tl.constexpr,
    direct: tl.constexpr,
    window: tl.constexpr,
    soft_cap: tl.constexpr,
) -> None:
    """Compute one sequence, one KV head and one split in one program."""
    # The KV head varies fastest: programs that run together read neighboring rows of the same pages.
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + seq).to(tl.int32)
    low = first_tile(seq_len - 1, window, tile_keys)
    split_len = _split_length(seq_len - low, num_splits, split_tokens, tile_keys)
    begin = low + split * split_len
    end = tl.minimum(begin + split_len, seq_len)
    if not direct and begin >= seq_len:
        return  # an empty split; the combine kernel does not read it

    rows = tl.arange(0, tile_rows)
    dims = tl.arange(0, tile_dim)
    heads = kv_head * group + rows
    in_group = rows < group
    used = in_group[:, None] & (dims < head_dim)[None, :]
    query = tl.load(query_ptr + seq * query_stride + heads[:, None] * head_dim + dims[None, :], mask=used, other=0.0)
    acc = tl.zeros([tile_rows, tile_dim], tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    top = tl.full([tile_rows], float("-inf"), tl.float32)
    last_key = tl.zeros([tile_rows], tl.int32) + (seq_len - 1)  # a split ends with a tile or with the sequence
    table = table_ptr + seq * table_stride
    block = tile_blocks(table, begin, seq_len, block_size, tile_keys)
    for start in range(begin, end, tile_keys):
        next_block = tile_blocks(table, start + tile_keys, seq_len, block_size, tile_keys)
        acc, total, top = attend_tile(
            acc, total, top, query, last_key, start, seq_len,
            block, key_ptr + kv_head * head_dim, value_ptr + kv_head * head_dim,
            block_stride, token_stride, scale_log2, block_size, head_dim, tile_dim, tile_keys, True, window, soft_cap,
        )  # fmt: skip
        block = next_block
    result = acc / tl.where(total > 0, total, 1.0)[:, None]  # a padding row (length 0) gives zeros
    num_heads = tl.num_programs(0) * group
    row = seq * num_heads + heads
    if direct:
        out = out_ptr + row[:, None] * head_dim + dims[None, :]
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=used)
    else:
        slot = row * num_splits + split
        tl.store(partial_ptr + slot[:, None] * head_dim + dims[None, :], result, mask=used)
        tl.store(lse_ptr + slot, top + tl.log2(total), mask=in_group)


@triton.jit(do_not_specialize=["num_splits", "split_tokens"])
def _combine_kernel(
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_splits: tl.tensor,
    split_tokens: tl.tensor,
    head_dim: tl.constexpr,
    tile_dim: tl.constexpr,
    tile_keys: tl.constexpr,
    tile_splits: tl.constexpr,
    window: tl.constexpr,
) -> None:
    """Combine the splits' results of one sequence and one query head, weighted by their sums of exponentials, in one
    program."""
    seq = tl.program_id(1)
    row = seq.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    seq_len = tl.load(seq_lens_ptr + seq).to(tl.int32)
    length = seq_len - first_tile(seq_len - 1, window, tile_keys)
    split_len = _split_length(length, num_splits, split_tokens, tile_keys)
    used = tl.cdiv(length, tl.maximum(split_len, 1))
    dims = tl.arange(0, tile_dim)
    in_head = dims < head_dim
    acc = tl.zeros([tile_dim], tl.float32)
    total = 0.0
    top = float("-inf")
    # A tile of fixed size, from split 0 on: the order of the sum does not depend on num_splits.
    for first in range(0, used, tile_splits):
        split = first + tl.arange(0, tile_splits)
        slot = row * num_splits + split
        lse = tl.load(lse_ptr + slot, mask=split < used, other=float("-inf"))
        readable = (split < used)[:, None] & in_head[None, :]
        part = tl.load(partial_ptr + slot[:, None] * head_dim + dims[None, :], mask=readable, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        weight = tl.exp2(lse - new_top)
        fade = tl.exp2(top - new_top)
        acc = acc * fade + tl.sum(part * weight[:, None], 0)
        total = total * fade + tl.sum(weight, 0)
        top = new_top
    result = acc / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * head_dim + dims, result.to(out_ptr.dtype.element_ty), mask=in_head)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The split of each sequence's keys. It is part of a CUDA graph's key.

    `num_splits`: programs per sequence and KV head. `split_tokens`: keys per split, counted from position 0, so that a
    row's result does not depend on the others (batch-invariant); 0 divides each sequence evenly into `num_splits`.
    """

    num_splits: int
    split_tokens: int = 0


def plan_decode(
    num_seqs: int, num_kv_heads: int, max_seq_len: int, num_sms: int, *, split_tokens: int = 0
) -> DecodePlan:
    """Choose the splits for a batch: the smallest number that keeps the device nearly full until the end.

    Args:
        num_seqs: sequences in the batch (rows, including padding).
        max_seq_len: upper bound of the sequences' lengths, in tokens, while the plan is used.
        num_sms: multiprocessors of the device.
        split_tokens: for batch-invariant results, the fixed length of a split (a multiple of 64), else 0.
    """
    require(split_tokens % TILE_KEYS == 0, f"split_tokens must be a multiple of {TILE_KEYS}, not {split_tokens}")
    if split_tokens:
        return DecodePlan(max(1, -(-max_seq_len // split_tokens)), split_tokens)
    slots = num_sms * PROGRAMS_PER_SM
    programs = max(1, num_seqs * num_kv_heads)
    most = max(1, min(max_seq_len // (2 * TILE_KEYS), MAX_SPLITS))

    def fullness(splits: int) -> float:
        waves = programs * splits / slots
        return 1.0 if waves >= 4 else waves / -(-programs * splits // slots)

    # Splits cost memory traffic for their results, so use the smallest sufficient number.
    best = max(range(1, most + 1), key=lambda splits: (min(fullness(splits), 0.9), -splits))
    return DecodePlan(best)


def decode_workspace(
    num_seqs: int, num_heads: int, head_dim: int, plan: DecodePlan, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return buffers for the splits' results: float32 [num_seqs, num_heads, num_splits, head_dim] and […
    num_splits]."""
    shape = (num_seqs, num_heads, plan.num_splits if plan.num_splits > 1 else 0)
    partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=device)
    return partial, torch.empty(shape, dtype=torch.float32, device=device)


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    plan: DecodePlan,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    out: torch.Tensor | None = None,
    workspace: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute the attention of each sequence's newest token over its whole sequence. The cache contains the token's
    key.

    Args:
        query: [num_seqs, num_heads, head_dim]; the row stride is free.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], dtype of `query` or float8_e4m3fn.
        block_table: int32 or int64 [num_seqs, max_blocks]: the cache block of each block_size tokens; the rest is not
            read.
        seq_lens: int32 or int64 [num_seqs], in tokens, including the new one; 0 marks a padding row with output 0.
        scale: factor of the scores, usually head_dim ** −0.5; above 0.
        plan: from `plan_decode`; every length must be within its `max_seq_len`.
        window: tokens that a token attends to, itself included; 0: all.
        soft_cap: c, if above 0: scores become c · tanh(score / c).
        out: [num_seqs, num_heads, head_dim], contiguous; allocated if not given.
        workspace: from `decode_workspace` for this plan; allocated if not given.

    Raises:
        ValueError, TypeError: a shape, stride or dtype is not as above. Values on the device are not checked.
    """
    require_cache(query, key_cache, value_cache)
    require_dtype("block_table", block_table, torch.int32, torch.int64)
    require_dtype("seq_lens", seq_lens, torch.int32, torch.int64)
    num_seqs, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    require(seq_lens.shape == (num_seqs,), f"seq_lens must be [{num_seqs}], not {list(seq_lens.shape)}")
    require(block_table.ndim == 2 and len(block_table) == num_seqs, f"block_table must have {num_seqs} rows")
    require(block_table.stride(1) == 1 and seq_lens.is_contiguous(), "block_table rows and seq_lens must be contiguous")
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    require(out.shape == query.shape and out.is_contiguous(), "out must be contiguous and shaped like query")
    if num_seqs == 0:
        return out
    direct = plan.num_splits == 1
    partial, lse = workspace or decode_workspace(num_seqs, num_heads, head_dim, plan, query.device)
    splits = (num_seqs, num_heads, plan.num_splits)
    require(
        direct or (partial.shape == (*splits, head_dim) and lse.shape == splits), "workspace belongs to another plan"
    )
    group, tile_dim = num_heads // num_kv_heads, triton.next_power_of_2(head_dim)
    _decode_kernel[(num_kv_heads, plan.num_splits, num_seqs)](
        query, key_cache, value_cache, block_table, seq_lens, out, partial, lse,
        scale * LOG2_E, query.stride(0), key_cache.stride(0), key_cache.stride(1), block_table.stride(0),
        plan.num_splits, plan.split_tokens,
        group=group, tile_rows=max(16, triton.next_power_of_2(group)), block_size=block_size, head_dim=head_dim,
        tile_dim=tile_dim, tile_keys=TILE_KEYS, direct=direct, window=window, soft_cap=soft_cap,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if not direct:
        _combine_kernel[(num_heads, num_seqs)](
            partial, lse, seq_lens, out, plan.num_splits, plan.split_tokens,
            head_dim=head_dim, tile_dim=tile_dim, tile_keys=TILE_KEYS, tile_splits=COMBINE_SPLITS, window=window,
            num_warps=4,
        )  # fmt: skip
    return out
