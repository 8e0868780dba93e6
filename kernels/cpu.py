"""Attention over a paged KV cache on the CPU, as large batched products of plain PyTorch.

Pages are [2 × num_kv_heads × num_blocks, block_size × head_dim]: the keys of all heads, then the values of all heads.
So one gather returns a batch of sequences as [2 × heads × batch, tokens, head_dim], for one product over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

MAX_QUERY = 128  # queries of one sequence in one product; bounds the scores' memory and skips later keys
# Measured costs of one group in microseconds: fixed, per key, and per key and query.
_GROUP_COST = 60.0
_KEY_COST = 0.035
_QUERY_KEY_COST = 0.015


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive new tokens of one sequence. They are the last of its first `length` tokens, to which they attend."""

    first_row: int  # row of the first token in the batch
    queries: int
    length: int
    table_row: int  # row of the sequence in the block table
    first_key: int = 0  # position of the first key that any of the tokens attends to; the start of a block

    @property
    def num_keys(self) -> int:
        return self.length - self.first_key


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Pieces that are computed together, padded to the longest."""

    pieces: int
    queries: int  # queries of each piece, padded
    keys: int  # keys of each piece, padded to whole blocks
    pages: torch.Tensor  # [2 × kv_heads × pieces × blocks], rows of the paged cache
    mask: torch.Tensor  # [kv_heads × pieces, 1 or group × queries, keys], 0 or −inf, to be added to the scores
    rows: torch.Tensor | None  # [pieces × queries] rows of the batch, padding repeats one; None: all rows, in order
    out_rows: torch.Tensor | None  # rows of the batch that are not padding
    out_valid: torch.Tensor | None  # their indexes among the [pieces × queries]; None: all


@dataclass(frozen=True, slots=True)
class PageShape:
    """The sizes of a paged cache and of the queries' heads."""

    num_blocks: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def pieces_of(
    query_lens: Sequence[int], lengths: Sequence[int], *, window: int = 0, block_size: int = 1
) -> list[Piece]:
    """Split a step's sequences into pieces of at most MAX_QUERY queries."""
    pieces: list[Piece] = []
    row = 0
    for table_row, (count, length) in enumerate(zip(query_lens, lengths, strict=True)):
        for start in range(0, count, MAX_QUERY):
            queries = min(MAX_QUERY, count - start)
            position = length - count + start
            first_key = max(position - window + 1, 0) // block_size * block_size if window else 0
            pieces.append(Piece(row + start, queries, position + queries, table_row, first_key))
        row += count
    return pieces


def split(pieces: list[Piece]) -> list[list[Piece]]:
    """Split `pieces`, which are ordered by size, where the saved padding exceeds the cost of another group."""
    if len(pieces) < 2:
        return [pieces]
    longest = _running_max([p.num_keys for p in pieces])
    longest_after = _running_max([p.num_keys for p in reversed(pieces)])[::-1]
    count, widest = len(pieces), pieces[-1].queries
    costs = [
        _cost(i, pieces[i - 1].queries, longest[i - 1]) + _cost(count - i, widest, longest_after[i])
        for i in range(1, count)
    ]
    best = min(range(1, count), key=lambda i: costs[i - 1])
    if costs[best - 1] >= _cost(count, widest, longest[-1]):
        return [pieces]
    return split(pieces[:best]) + split(pieces[best:])


def _running_max(values: list[int]) -> list[int]:
    result: list[int] = np.maximum.accumulate(values).tolist()
    return result


def _cost(pieces: int, queries: int, length: int) -> float:
    return _GROUP_COST + pieces * length * (_KEY_COST + _QUERY_KEY_COST * (queries - 1))


def plan(
    query_lens: Sequence[int],
    lengths: Sequence[int],
    block_table: torch.Tensor,
    shape: PageShape,
    dtype: torch.dtype,
    *,
    window: int = 0,
) -> list[AttentionGroup]:
    """Return the groups that every layer of a step uses.

    Args:
        query_lens, lengths: number of new tokens and of all tokens of each sequence.
        block_table: integer [num_seqs, max_blocks], padded with block 0.
        dtype: of the cache.
        window: tokens that a token attends to, itself included; 0: all.
    """
    pieces = pieces_of(query_lens, lengths, window=window, block_size=shape.block_size)
    ordered = sorted(pieces, key=lambda p: (p.queries, p.num_keys))
    groups = split(ordered)
    if len(groups) == 1 and len({p.queries for p in pieces}) == 1:
        # All rows in the batch's own order.
        return [_group(pieces, block_table, shape, dtype, window, all_rows=True)]
    return [_group(group, block_table, shape, dtype, window, all_rows=False) for group in groups]


def _group(
    pieces: list[Piece],
    block_table: torch.Tensor,
    shape: PageShape,
    dtype: torch.dtype,
    window: int,
    *,
    all_rows: bool,
) -> AttentionGroup:
    count, queries = len(pieces), max(p.queries for p in pieces)
    blocks = -(-max(p.num_keys for p in pieces) // shape.block_size)
    keys = blocks * shape.block_size
    tables = block_table[torch.tensor([p.table_row for p in pieces])]
    first_keys = torch.tensor([p.first_key for p in pieces])[:, None]
    if window:  # blocks after a sequence's last one are hidden
        places = first_keys // shape.block_size + torch.arange(blocks)
        tables = tables.gather(1, places.clamp_(max=tables.shape[1] - 1))
    else:
        tables = tables[:, :blocks]
    heads = torch.arange(2 * shape.num_kv_heads)[:, None] * shape.num_blocks
    pages = (heads + tables.reshape(1, -1)).reshape(-1)
    places = torch.arange(queries)
    used = torch.tensor([p.queries for p in pieces])
    first = torch.tensor([p.first_row for p in pieces])
    # Padding queries repeat their piece's last one, and their results are dropped.
    within = torch.minimum(places[None], used[:, None] - 1)
    positions = torch.tensor([p.length for p in pieces])[:, None] - used[:, None] + within
    key_positions = (first_keys + torch.arange(keys))[:, None]
    hidden = key_positions > positions[:, :, None]
    if window:
        hidden |= key_positions <= positions[:, :, None] - window
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    group = shape.num_heads // shape.num_kv_heads if queries > 1 else 1
    mask = mask[None, :, None].expand(shape.num_kv_heads, count, group, queries, keys)
    rows = (first[:, None] + within).reshape(-1)
    valid = (places[None] < used[:, None]).reshape(-1)
    padded = queries * count != sum(p.queries for p in pieces)
    return AttentionGroup(
        pieces=count,
        queries=queries,
        keys=keys,
        pages=pages,
        mask=mask.reshape(shape.num_kv_heads * count, group * queries, keys),
        rows=None if all_rows else rows,
        out_rows=None if all_rows else rows[valid],
        out_valid=valid.nonzero()[:, 0] if padded else None,
    )


def write(key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write keys and values to their slots. Values that follow their keys in memory are copied with them.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim].
        pages: one layer's cache, [2 × num_kv_heads × num_blocks, block_size × head_dim].
        slot_mapping: integer [num_tokens], block × block_size + offset, all different.
    """
    heads, head_dim = key.shape[1:]
    slots = pages.view(2 * heads, -1, head_dim)
    indexes = slot_mapping.long()
    gap = value.data_ptr() - key.data_ptr()
    if gap == heads * head_dim * key.element_size() and key.stride() == value.stride():
        both = key.as_strided((len(key), 2 * heads, head_dim), key.stride())
        slots.index_copy_(1, indexes, both.transpose(0, 1))
        return
    slots[:heads].index_copy_(1, indexes, key.transpose(0, 1))
    slots[heads:].index_copy_(1, indexes, value.transpose(0, 1))


def attend(
    query: torch.Tensor,
    pages: torch.Tensor,
    groups: Sequence[AttentionGroup],
    shape: PageShape,
    scale: float,
    workspace: torch.Tensor,
    *,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Compute the causal attention of a step's new tokens over their sequences' pages.

    Args:
        query: [num_tokens, num_heads, head_dim].
        pages: one layer's cache, which contains the new tokens' keys and values.
        groups: from `plan`.
        workspace: flat, dtype of the cache, at least `workspace_size(groups)` numbers.
        soft_cap: c, if above 0: scores become c · tanh(score / c).

    Returns:
        [num_tokens, num_heads × head_dim].
    """
    if len(groups) == 1 and groups[0].rows is None:
        return _attend_group(query, pages, groups[0], shape, scale, workspace, soft_cap)
    out = torch.empty(query.shape[0], shape.num_heads * shape.head_dim, dtype=query.dtype)
    for group in groups:
        result = _attend_group(query[group.rows], pages, group, shape, scale, workspace, soft_cap)
        if group.out_valid is not None:
            result = result[group.out_valid]
        out[group.out_rows] = result
    return out


def workspace_size(groups: Sequence[AttentionGroup], shape: PageShape) -> int:
    """Return how many numbers the workspace of `attend` needs."""
    return max(g.pages.numel() for g in groups) * shape.block_size * shape.head_dim


def _attend_group(
    query: torch.Tensor,
    pages: torch.Tensor,
    group: AttentionGroup,
    shape: PageShape,
    scale: float,
    workspace: torch.Tensor,
    soft_cap: float,
) -> torch.Tensor:
    """Return [pieces × queries, num_heads × head_dim] for query [pieces × queries, num_heads, head_dim]."""
    count, queries, keys = group.pieces, group.queries, group.keys
    kv_heads, head_dim = shape.num_kv_heads, shape.head_dim
    share = shape.num_heads // kv_heads
    rows = group.pages.numel()
    gathered = workspace[: rows * pages.shape[1]].view(rows, pages.shape[1])
    torch.index_select(pages, 0, group.pages, out=gathered)
    cached = gathered.view(2, kv_heads * count, keys, head_dim)
    # The queries that share a KV head are rows of one product.
    packed = query.reshape(count, queries, kv_heads, share, head_dim).permute(2, 0, 3, 1, 4)
    packed = packed.reshape(kv_heads * count, share * queries, head_dim)
    if soft_cap:
        scores = torch.bmm(packed, cached[0].transpose(1, 2)).mul_(scale / soft_cap).tanh_().mul_(soft_cap)
        out = torch.bmm(scores.add_(group.mask).softmax(-1), cached[1])
    elif count * queries == 1:  # one decode: the fused kernel has less overhead than three products
        out = functional.scaled_dot_product_attention(
            packed[None], cached[:1], cached[1:], attn_mask=group.mask[None], scale=scale
        )[0]
    else:
        scores = torch.baddbmm(group.mask, packed, cached[0].transpose(1, 2), alpha=scale)
        out = torch.bmm(scores.softmax(-1), cached[1])
    unpacked = out.view(kv_heads, count, share, queries, head_dim).permute(1, 3, 0, 2, 4)
    return unpacked.reshape(count * queries, shape.num_heads * head_dim)
