"""Rotary position embedding of queries and keys, and writes of keys and values to the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.checks import require, require_dtype, require_heads


@triton.jit
def _rotate_kernel(
    x_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    x_stride: tl.tensor,
    heads: tl.constexpr,
    tile_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    tile_half: tl.constexpr,
) -> None:
    """Rotate `tile_heads` heads of one token in one program."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)
    dims = tl.arange(0, tile_half)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * half + dims, mask=dims < half, other=0.0)
    sin = tl.load(sin_ptr + position * half + dims, mask=dims < half, other=0.0)
    at = x_ptr + token * x_stride + head[:, None] * head_dim + dims[None, :]
    inside = (head < heads)[:, None] & (dims < half)[None, :]
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    element: tl.constexpr = x_ptr.dtype.element_ty
    tl.store(at, (low * cos[None, :] - high * sin[None, :]).to(element), mask=inside)
    tl.store(at + half, (high * cos[None, :] + low * sin[None, :]).to(element), mask=inside)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> None:
    """Rotate the first dimensions of each head in place, by halves: dimension i is paired with i + rotary / 2.

    Args:
        x: [num_tokens, heads, head_dim]; the row stride is free (a view into a fused projection's output).
        cos, sin: float32 [max_positions, rotary / 2], contiguous; rotary is at most head_dim.
        positions: integer [num_tokens], each below max_positions.

    Raises:
        ValueError, TypeError: a shape, stride or dtype is not as above. Values on the device are not checked.
    """
    require_heads("x", x, 3)
    num_tokens, heads, head_dim = x.shape
    for name, tensor in (("cos", cos), ("sin", sin)):
        require_dtype(name, tensor, torch.float32)
        require(
            tensor.ndim == 2 and 2 * tensor.shape[1] <= head_dim, f"{name} must be [positions, at most {head_dim // 2}]"
        )
        require(tensor.is_contiguous(), f"{name} must be contiguous")
    require(cos.shape == sin.shape, "cos and sin must have one shape")
    require_dtype("positions", positions, torch.int32, torch.int64)
    require(positions.shape == (num_tokens,) and positions.is_contiguous(), f"positions must be [{num_tokens}]")
    if num_tokens == 0:
        return
    half = cos.shape[1]
    tile_half = triton.next_power_of_2(half)
    tile_heads = min(triton.next_power_of_2(heads), max(1, 1024 // tile_half))
    _rotate_kernel[(num_tokens, triton.cdiv(heads, tile_heads))](
        x, cos, sin, positions, x.stride(0),
        heads=heads, tile_heads=tile_heads, head_dim=head_dim, half=half, tile_half=tile_half,
        num_warps=max(1, min(4, tile_heads * tile_half // 256)),
    )  # fmt: skip


@triton.jit
def _to_element(x: tl.tensor, element: tl.constexpr) -> tl.tensor:
    """Return numbers in the cache's type. Those beyond the range of 8 bits become its largest number, and NaN stays."""
    if element == x.dtype:
        return x
    wide = x.to(tl.float32)
    wide = tl.where(wide > 448.0, 448.0, wide)
    return tl.where(wide < -448.0, -448.0, wide).to(element)


@triton.jit
def _write_cache_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    block_size: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Copy `tile` numbers of one token's keys and values in one program."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = column < width
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        row = slot // block_size * block_stride + slot % block_size * token_stride
        key = tl.load(key_ptr + token * key_stride + column, mask=inside)
        tl.store(key_cache_ptr + row + column, _to_element(key, key_cache_ptr.dtype.element_ty), mask=inside)
        value = tl.load(value_ptr + token * value_stride + column, mask=inside)
        tl.store(value_cache_ptr + row + column, _to_element(value, value_cache_ptr.dtype.element_ty), mask=inside)


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write each token's key and value to its slot.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim]; the row stride is free.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], dtype of `key` or float8_e4m3fn.
        slot_mapping: integer [num_tokens]: block × block_size + offset, all different; −1 writes nothing (padding).

    Raises:
        ValueError, TypeError: a shape, stride or dtype is not as above. Values on the device are not checked.
    """
    require_heads("key", key, 3)
    num_tokens, num_kv_heads, head_dim = key.shape
    require_heads("value", value, 3)
    require(value.shape == key.shape, "value must be shaped like key")
    require_dtype("value", value, key.dtype)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        require_heads(name, cache, 4)
        require(cache.shape[2:] == key.shape[1:], f"{name} must have the heads of key")
        require_dtype(name, cache, key.dtype, torch.float8_e4m3fn)
    require(key_cache.shape == value_cache.shape, "key_cache and value_cache must have one shape")
    require(key_cache.stride() == value_cache.stride(), "key_cache and value_cache must have the same strides")
    require_dtype("slot_mapping", slot_mapping, torch.int32, torch.int64)
    require(
        slot_mapping.shape == (num_tokens,) and slot_mapping.is_contiguous(),
        f"slot_mapping must be contiguous [{num_tokens}]",
    )
    if num_tokens == 0:
        return
    width = num_kv_heads * head_dim
    tile = min(triton.next_power_of_2(width), 1024)
    _write_cache_kernel[(num_tokens, triton.cdiv(width, tile))](
        key, value, slot_mapping, key_cache, value_cache,
        key.stride(0), value.stride(0), key_cache.stride(0), key_cache.stride(1),
        block_size=key_cache.shape[1], width=width, tile=tile, num_warps=max(1, min(4, tile // 256)),
    )  # fmt: skip
