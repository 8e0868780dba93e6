"""Rotary position embedding of queries and keys, fused with writing keys and values to the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.checks import require, require_cache, require_dtype, require_heads


@triton.jit
def _rope_cache_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    group: tl.constexpr,
    tile_heads: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
) -> None:
    """Compute one token, one KV head and the query heads that share it in one program."""
    half: tl.constexpr = head_dim // 2
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    dims = tl.arange(0, half)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * half + dims)
    sin = tl.load(sin_ptr + position * half + dims)

    heads = tl.arange(0, tile_heads)
    in_group = (heads < group)[:, None]
    at = query_ptr + token * query_stride + (kv_head * group + heads)[:, None] * head_dim + dims[None, :]
    query_low = tl.load(at, mask=in_group, other=0.0).to(tl.float32)
    query_high = tl.load(at + half, mask=in_group, other=0.0).to(tl.float32)
    element: tl.constexpr = query_ptr.dtype.element_ty
    tl.store(at, (query_low * cos[None, :] - query_high * sin[None, :]).to(element), mask=in_group)
    tl.store(at + half, (query_high * cos[None, :] + query_low * sin[None, :]).to(element), mask=in_group)

    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        row = slot // block_size * block_stride + slot % block_size * token_stride + kv_head * head_dim
        key_at = key_ptr + token * key_stride + kv_head * head_dim + dims
        key_low = tl.load(key_at).to(tl.float32)
        key_high = tl.load(key_at + half).to(tl.float32)
        tl.store(key_cache_ptr + row + dims, (key_low * cos - key_high * sin).to(element))
        tl.store(key_cache_ptr + row + half + dims, (key_high * cos + key_low * sin).to(element))
        value_at = value_ptr + token * value_stride + kv_head * head_dim + dims
        tl.store(value_cache_ptr + row + dims, tl.load(value_at))
        tl.store(value_cache_ptr + row + half + dims, tl.load(value_at + half))


def rope_write_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Rotate `query` in place, and write the rotated keys and the values to the cache. `key` and `value` are not
    changed.

    Rotation is by halves (as in Llama checkpoints): dimension i is paired with dimension i + head_dim/2.

    Args:
        query: [num_tokens, num_heads, head_dim]; the row stride is free (a view into a fused projection's output).
        key, value: [num_tokens, num_kv_heads, head_dim], in the same layout.
        cos, sin: float32 [max_positions, head_dim / 2], contiguous.
        positions: integer [num_tokens], each below max_positions.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], dtype of `query`.
        slot_mapping: integer [num_tokens]: block × block_size + offset, all different; −1 writes nothing (padding).

    Raises:
        ValueError, TypeError: a shape, stride or dtype is not as above. Values on the device are not checked.
    """
    require_cache(query, key_cache, value_cache)
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    for name, tensor in (("key", key), ("value", value)):
        require_heads(name, tensor, 3)
        require(tensor.shape == (num_tokens, num_kv_heads, head_dim), f"{name} must have the cache's heads")
        require_dtype(name, tensor, query.dtype)
    for name, tensor in (("cos", cos), ("sin", sin)):
        require_dtype(name, tensor, torch.float32)
        require(tensor.ndim == 2 and tensor.shape[1] == head_dim // 2, f"{name} must be [positions, {head_dim // 2}]")
        require(tensor.is_contiguous(), f"{name} must be contiguous")
    for name, tensor in (("positions", positions), ("slot_mapping", slot_mapping)):
        require_dtype(name, tensor, torch.int32, torch.int64)
        require(tensor.shape == (num_tokens,) and tensor.is_contiguous(), f"{name} must be contiguous [{num_tokens}]")
    if num_tokens == 0:
        return
    group = num_heads // num_kv_heads
    tile_heads = triton.next_power_of_2(group)
    _rope_cache_kernel[(num_tokens, num_kv_heads)](
        query, key, value, cos, sin, positions, slot_mapping, key_cache, value_cache,
        query.stride(0), key.stride(0), value.stride(0), key_cache.stride(0), key_cache.stride(1),
        group=group, tile_heads=tile_heads, block_size=block_size, head_dim=head_dim,
        num_warps=max(1, min(4, tile_heads * head_dim // 512)),
    )  # fmt: skip
