"""One step of attention over a paged cache: adds a tile of keys and values to a running softmax."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _readable(start: tl.tensor, seq_len: tl.tensor, tile_keys: tl.constexpr) -> tl.tensor:
    """Return the positions of a tile's keys, limited to the sequence's last key.

    So no load needs a mask, and uninitialized cache entries are not read (a NaN there would remain with a weight of 0).
    """
    return tl.minimum(start + tl.arange(0, tile_keys), tl.maximum(seq_len - 1, 0))


@triton.jit
def tile_blocks(
    table_ptr: tl.tensor, start: tl.tensor, seq_len: tl.tensor, block_size: tl.constexpr, tile_keys: tl.constexpr
) -> tl.tensor:
    """Return the cache block of each key start … start + tile_keys − 1.

    Load blocks one tile ahead. Then the loads of keys and values do not wait for another load, and the compiler
    pipelines them as deep as `num_stages` (with the table's load in the same step, it pipelines only one tile).
    """
    return tl.load(table_ptr + _readable(start, seq_len, tile_keys) // block_size).to(tl.int32)


@triton.jit
def first_tile(position: tl.tensor, window: tl.constexpr, tile_keys: tl.constexpr) -> tl.tensor:
    """Return the start of the first tile with keys that the token at `position` attends to."""
    if window == 0:
        return position * 0
    return tl.maximum(position - window + 1, 0) // tile_keys * tile_keys


@triton.jit
def _load_rows(pointers: tl.tensor, dims: tl.tensor, head_dim: tl.constexpr, tile_dim: tl.constexpr) -> tl.tensor:
    """Return a tile's keys or values, [tile_keys, tile_dim]; 0 after `head_dim` dimensions."""
    if tile_dim == head_dim:
        return tl.load(pointers)
    return tl.load(pointers, mask=(dims < head_dim)[None, :], other=0.0)


@triton.jit
def attend_tile(
    acc: tl.tensor,  # [rows, tile_dim] float32: the weighted sum of values so far, relative to `top`
    total: tl.tensor,  # [rows] float32: the sum of weights so far, relative to `top`
    top: tl.tensor,  # [rows] float32: the largest score so far, in powers of two
    query: tl.tensor,  # [rows, tile_dim], 0 after head_dim dimensions
    last_key: tl.tensor,  # [rows] int32: the last position each row may see; read only when `masked`
    start: tl.tensor,  # position of the tile's first key
    seq_len: tl.tensor,
    block: tl.tensor,  # [tile_keys] int32, from `tile_blocks`
    key_ptr: tl.tensor,  # this head's first key in block 0
    value_ptr: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    scale_log2: tl.tensor,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    tile_dim: tl.constexpr,  # head_dim, rounded up to a power of two
    tile_keys: tl.constexpr,
    masked: tl.constexpr,
    window: tl.constexpr,  # tokens that a token attends to, itself included; 0: all. Needs `masked`.
    soft_cap: tl.constexpr,  # c: scores become c · tanh(score / c); 0: no limit
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add keys start … start + tile_keys − 1 to (acc, total, top) and return them.

    Without a window, every row must see at least one key of its first tile; otherwise `top` stays −inf and the result
    is NaN. With a window, a row's first tiles may be hidden.
    """
    positions = start + tl.arange(0, tile_keys)
    readable = _readable(start, seq_len, tile_keys) if masked else positions
    # int64: a big cache has over 2³¹ elements.
    rows = block.to(tl.int64) * block_stride + (readable % block_size) * token_stride
    dims = tl.arange(0, tile_dim)
    # Keys and values in 8 bits are multiplied in the dtype of the query.
    key = _load_rows(key_ptr + rows[:, None] + dims[None, :], dims, head_dim, tile_dim).to(query.dtype)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
    if soft_cap > 0:
        cap: tl.constexpr = soft_cap * 1.4426950408889634  # scores are in powers of two
        # tanh(x) = 1 − 2 / (exp(2x) + 1); an overflow to infinity gives 1, which is correct.
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * 1.4426950408889634 / cap)) + 1.0))
    if masked:
        scores = tl.where(positions[None, :] <= last_key[:, None], scores, float("-inf"))
    if window > 0:
        scores = tl.where(positions[None, :] > last_key[:, None] - window, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = new_top
    if window > 0:
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # −inf − −inf is not a number
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    value = _load_rows(value_ptr + rows[:, None] + dims[None, :], dims, head_dim, tile_dim).to(query.dtype)
    acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    total = total * fade + tl.sum(weights, 1)
    return acc, total, new_top
