"""Argument checks of the kernels' launchers."""

from __future__ import annotations

import math

import torch

LOG2_E = math.log2(math.e)  # the kernels take powers of two: exp(x) = exp2(x · log2 e)


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` if `condition` is false."""
    if not condition:
        raise ValueError(message)


def require_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raise TypeError unless `tensor` has one of `dtypes`."""
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be {wanted}, not {str(tensor.dtype).removeprefix('torch.')}")


def require_heads(name: str, tensor: torch.Tensor, ndim: int) -> None:
    """Raise ValueError unless `tensor` is [..., heads, head_dim] with its last two dimensions packed.

    The leading strides are free, so `tensor` can be a view into a fused projection's output or a layer of a larger
    cache.
    """
    require(tensor.ndim == ndim, f"{name} must have {ndim} dimensions, not {tensor.ndim}")
    heads, head_dim = tensor.shape[-2:]
    packed = tensor.stride(-1) == 1 and (heads == 1 or tensor.stride(-2) == head_dim)
    require(packed, f"{name} must be packed in its last two dimensions, not strided {tensor.stride()}")


def require_cache(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Raise unless the caches are [num_blocks, block_size, num_kv_heads, head_dim] and fit `query`'s heads."""
    require_heads("query", query, 3)
    require_heads("key_cache", key_cache, 4)
    require_heads("value_cache", value_cache, 4)
    require(key_cache.shape == value_cache.shape, "key_cache and value_cache must have one shape")
    require(key_cache.stride() == value_cache.stride(), "key_cache and value_cache must have the same strides")
    require_dtype("key_cache", key_cache, query.dtype, torch.float8_e4m3fn)
    require_dtype("value_cache", value_cache, key_cache.dtype)
    heads, head_dim = query.shape[-2:]
    _, block_size, num_kv_heads, cache_dim = key_cache.shape
    require(cache_dim == head_dim, f"the cache's head_dim is {cache_dim}, the query's {head_dim}")
    require(heads % num_kv_heads == 0, f"{heads} query heads are not a multiple of {num_kv_heads} KV heads")
    require(head_dim % 16 == 0 and head_dim <= 256, f"head_dim must be a multiple of 16, at most 256, not {head_dim}")
    require(block_size & (block_size - 1) == 0, f"block_size must be a power of two, not {block_size}")
