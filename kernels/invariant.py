"""Batch-invariant arithmetic: a row's result has the same bits whatever else is computed. Plain PyTorch on any device.

Additions, multiplications, divisions, square roots and comparisons of single numbers are fixed by IEEE 754. Three types
of
operations are not, and each has a rule here:

- Matrix products and norms choose their kernel, and so the order of their sums, by shape. They are called with only one
  shape (`in_tiles`, and the batches of `attend`).
- exp and similar functions round differently in a vector loop and in the scalar loop for the remainder. There is never
  a remainder (`apply_elementwise`).
- Sums over keys are trees of additions (`add_up`), over keys that are split from position 0 on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from kernels.cpu import PageShape

TILE_ROWS = 16  # rows of every call `in_tiles` makes
_TILE_TOKENS = 4  # consecutive positions whose queries form a tile: 0 to 3, 4 to 7, …
_SPLIT_KEYS = 128  # minimum keys of a split
_BATCH_TILES = 8  # tiles in one batch of products
_WHOLE_VECTORS = 64  # elements; a multiple of any CPU's vector width
_ONE_THREAD = 1 << 14  # elements that no operation divides among threads


def in_tiles(function: Callable[..., torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
    """Return `function` of each tile of TILE_ROWS rows, in a separate call. The last tile is filled up with zeros.

    Args:
        function: takes tensors [TILE_ROWS, …] and returns [TILE_ROWS, …]. Each row must depend only on the same input
            rows.
        rows: tensors [n, …], n above 0.

    Returns:
        [n, …].
    """
    count = len(rows[0])
    tiles = [torch.split(functional.pad(x, (0, 0, 0, -count % TILE_ROWS)), TILE_ROWS) for x in rows]
    return torch.cat([function(*tile) for tile in zip(*tiles, strict=True)])[:count]


def require_equal_rows(function: Callable[[torch.Tensor], torch.Tensor], row: torch.Tensor) -> None:
    """Check that `function` returns equal rows for a tile whose rows are all `row` [width].

    Raises:
        RuntimeError: the rows differ on this machine.
    """
    result = function(row.expand(TILE_ROWS, -1).contiguous())
    if not torch.equal(result, result[:1].expand_as(result)):
        shape = f"[{TILE_ROWS}, {row.shape[0]}] × [{row.shape[0]}, {result.shape[1]}]"
        raise RuntimeError(f"not batch-invariant on this machine: equal rows of a product {shape} differ")


def apply_elementwise(function: Callable[[torch.Tensor], object], x: torch.Tensor) -> torch.Tensor:
    """Return a copy of x after `function`, which changes its elements in place."""
    flat = functional.pad(x.reshape(-1), (0, -x.numel() % _WHOLE_VECTORS))
    for part in [flat] if x.is_cuda else torch.split(flat, _ONE_THREAD):  # CUDA uses one code path for all elements
        function(part)
    return flat[: x.numel()].view(x.shape)


def add_up(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the last dimension, which becomes 1, as a tree of pairwise additions."""
    while (width := x.shape[-1]) > 1:
        if width % 2:
            x = functional.pad(x, (0, 1))
        x = x[..., : (width + 1) // 2] + x[..., (width + 1) // 2 :]
    return x


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up, [num_tokens, width], for [num_tokens, 2 × width] with gate before up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return apply_elementwise(partial(functional.silu, inplace=True), gate).mul_(up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) · up with the tanh approximation, shaped as in `silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return apply_elementwise(lambda x: x.copy_(functional.gelu(x, approximate="tanh")), gate).mul_(up)


def limit_softly(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap · tanh(x / cap)."""
    return apply_elementwise(torch.tanh_, x / cap).mul_(cap)


@dataclass(frozen=True, slots=True)
class Split:
    """Keys of consecutive positions, for the tiles of a batch that see any of them. These are the batch's first
    tiles."""

    tiles: int
    pages: torch.Tensor  # [2 × _BATCH_TILES × kv_heads × blocks], rows of the paged cache
    hidden: torch.Tensor | None  # [tiles, 1, 1, _TILE_TOKENS, keys]: keys that a query must not see; None: no key


@dataclass(frozen=True, slots=True)
class InvariantPlan:
    """The plan that every layer of a step uses."""

    places: torch.Tensor  # [num_tokens]: each token's index among the batches × _BATCH_TILES × _TILE_TOKENS
    batches: list[list[Split]]  # splits of each batch of tiles, longest context first


def split_keys(block_size: int) -> int:
    """Return the keys per split: whole blocks, so that every matrix of a batch starts at a multiple of 64 bytes."""
    unit = math.lcm(block_size, 16)
    return -(-_SPLIT_KEYS // unit) * unit


def plan(
    query_lens: Sequence[int], lengths: Sequence[int], block_table: torch.Tensor, shape: PageShape, *, window: int = 0
) -> InvariantPlan:
    """Split a step's sequences into tiles of queries and splits of keys, both counted from position 0.

    Args:
        query_lens, lengths: number of new tokens and of all tokens of each sequence.
        block_table: integer [num_seqs, max_blocks].
        window: tokens that a token attends to, itself included; 0: all. Splits that no tile of a batch sees are
            skipped. They would not change a bit of the result.
    """
    news, ends = np.array(query_lens), np.array(lengths)
    starts, keys = ends - news, split_keys(shape.block_size)
    first = starts // _TILE_TOKENS
    counts = (ends - 1) // _TILE_TOKENS - first + 1
    before = np.cumsum(counts) - counts
    seqs = np.repeat(np.arange(len(news)), counts)
    numbers = np.arange(len(seqs)) + np.repeat(first - before, counts)  # index of each tile in its sequence
    splits = numbers * _TILE_TOKENS // keys + 1
    order = np.argsort(-splits, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    positions = np.arange(news.sum()) + np.repeat(starts - np.cumsum(news) + news, news)
    tile_of = positions // _TILE_TOKENS + np.repeat(before - first, news)
    places = torch.from_numpy(place[tile_of] * _TILE_TOKENS + positions % _TILE_TOKENS)
    device = block_table.device
    tables = block_table[torch.from_numpy(seqs[order]).to(device)]
    width = int(splits.max()) * (keys // shape.block_size)
    tables = functional.pad(tables, (0, width - tables.shape[1], 0, -len(order) % _BATCH_TILES))
    batches = []
    for at in range(0, len(order), _BATCH_TILES):
        part = order[at : at + _BATCH_TILES]
        table = tables[at : at + _BATCH_TILES]
        lowest = int(numbers[part].min()) * _TILE_TOKENS - window + 1 if window else 0
        used = range(max(lowest, 0) // keys, splits[part[0]])
        batches.append([_split(i, numbers[part[splits[part] > i]], table, shape, window) for i in used])
    return InvariantPlan(places.to(device), batches)


def _split(
    index: int,
    numbers: np.ndarray[tuple[int], np.dtype[np.int64]],
    table: torch.Tensor,
    shape: PageShape,
    window: int,
) -> Split:
    """Return the split `index` of the tiles `numbers`, which are the first tiles in `table` [_BATCH_TILES,
    max_blocks]."""
    keys = split_keys(shape.block_size)
    blocks = keys // shape.block_size
    heads = torch.arange(2 * shape.num_kv_heads, device=table.device) * shape.num_blocks
    pages = heads.view(2, 1, -1, 1) + table[:, None, index * blocks : (index + 1) * blocks]
    hidden = None
    behind = bool(window) and (int(numbers.max()) + 1) * _TILE_TOKENS - 1 - window >= index * keys
    if behind or int(numbers.min()) * _TILE_TOKENS < (index + 1) * keys - 1:
        positions = torch.arange(index * keys, (index + 1) * keys)
        queries = torch.from_numpy(numbers)[:, None] * _TILE_TOKENS + torch.arange(_TILE_TOKENS)
        queries = queries[:, None, None, :, None]
        unseen = positions > queries
        if window:
            unseen |= positions <= queries - window
        hidden = unseen.to(table.device)
    return Split(len(numbers), pages.reshape(-1), hidden)


class Workspace:
    """The reusable buffers for one split of a batch."""

    def __init__(self, shape: PageShape, dtype: torch.dtype, device: torch.device) -> None:
        keys = 2 * _BATCH_TILES * shape.num_kv_heads * split_keys(shape.block_size)
        size = (keys // shape.block_size, shape.block_size * shape.head_dim)
        self.gathered = torch.empty(size, dtype=dtype, device=device)
        self.wide = torch.empty(size, device=device)


def attend(
    query: torch.Tensor,
    pages: torch.Tensor,
    plan: InvariantPlan,
    shape: PageShape,
    scale: float,
    workspace: Workspace,
    *,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Compute the causal attention of a step's new tokens over their sequences' pages, in float32.

    Args:
        query: [num_tokens, num_heads, head_dim].
        pages: one layer's cache, [2 × num_kv_heads × num_blocks, block_size × head_dim], as in `kernels.cpu`. It
            contains the new tokens' keys and values, and only finite numbers.
        plan: from `plan`.
        soft_cap: c, if above 0: scores become c · tanh(score / c).

    Returns:
        [num_tokens, num_heads × head_dim].
    """
    tiles, kv_heads, head_dim = len(plan.batches) * _BATCH_TILES, shape.num_kv_heads, shape.head_dim
    by_place = query.new_zeros((tiles * _TILE_TOKENS, shape.num_heads, head_dim), dtype=torch.float32)
    by_place.index_copy_(0, plan.places, query.float() * scale)
    # The queries that share a KV head are rows of one product.
    packed = by_place.view(tiles, _TILE_TOKENS, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(len(plan.batches), _BATCH_TILES * kv_heads, -1, head_dim)
    out = torch.empty_like(packed)
    for index, splits in enumerate(plan.batches):
        _attend_batch(packed[index], out[index], pages, splits, shape, workspace, soft_cap)
    unpacked = out.view(tiles, kv_heads, -1, _TILE_TOKENS, head_dim).permute(0, 3, 1, 2, 4)
    return unpacked.reshape(len(by_place), -1).index_select(0, plan.places).to(query.dtype)


def _attend_batch(
    queries: torch.Tensor,
    out: torch.Tensor,
    pages: torch.Tensor,
    splits: Sequence[Split],
    shape: PageShape,
    workspace: Workspace,
    soft_cap: float,
) -> None:
    """Write the attention of queries [_BATCH_TILES × kv_heads, rows, head_dim] to `out`, which has the same shape.

    Splits are processed in order from position 0, with a running maximum. A tile is within one split, so all its
    queries use the same splits. A query may see no key of its first splits: their sums are exactly 0, with a maximum of
    −inf.
    """
    kv_heads, keys = shape.num_kv_heads, split_keys(shape.block_size)
    top = queries.new_full((*queries.shape[:2], 1), float("-inf"))
    total = torch.zeros_like(top)
    out.zero_()
    for split in splits:
        torch.index_select(pages, 0, split.pages, out=workspace.gathered)
        cached = workspace.wide.copy_(workspace.gathered).view(2, -1, keys, shape.head_dim)
        scores = torch.bmm(queries, cached[0].transpose(1, 2))
        seen = split.tiles * kv_heads
        visible = scores[:seen]
        if soft_cap:
            visible.copy_(limit_softly(visible, soft_cap))
        if split.hidden is not None:
            by_head = visible.view(split.tiles, kv_heads, -1, _TILE_TOKENS, keys)
            by_head.masked_fill_(split.hidden, float("-inf"))
        new_top = torch.maximum(top[:seen], visible.amax(-1, keepdim=True))
        base = new_top.clamp(min=torch.finfo(new_top.dtype).min)  # −inf − −inf is not a number
        shrink = apply_elementwise(torch.exp_, top[:seen] - base)
        visible.copy_(apply_elementwise(torch.exp_, visible.sub_(base)))
        top[:seen] = new_top
        total[:seen].mul_(shrink).add_(add_up(visible))
        out[:seen].mul_(shrink).add_(torch.bmm(scores, cached[1])[:seen])
    out.div_(total)
