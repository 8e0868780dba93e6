"""Reference implementations of all kernels in plain PyTorch. They are slow and readable, and all tests compare with
them."""

from __future__ import annotations

import torch

KV_GROUP = 32  # numbers of a head that share a scale in an 8-bit KV cache
MAX_FP8 = 448.0
_MAX_KV = 3.3e38  # so that 127 times the scale is finite in bfloat16


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in float32.

    Args:
        x: [..., hidden].
        weight: [hidden], dtype of x.
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up, [num_tokens, width], for x [num_tokens, 2 × width] with gate before up."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rope_tables(inverse_frequencies: torch.Tensor, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, float32 [max_positions, head_dim / 2], for the rotary embedding."""
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies.float())
    return angles.cos(), angles.sin()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate by halves: dimension i is paired with dimension i + head_dim/2.

    Args:
        x: [num_tokens, heads, head_dim].
        cos, sin: [num_tokens, head_dim / 2], for each token's position.
    """
    cos, sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write each token's key and value to its slot.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim].
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        slot_mapping: integer [num_tokens], block × block_size + offset, all different.
    """
    slots = slot_mapping.long()
    key_cache.flatten(0, 1)[slots] = key
    value_cache.flatten(0, 1)[slots] = value


def quantize_kv(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys or values [..., head_dim] as int8 [..., head_dim] and scales, bfloat16 [..., head_dim / KV_GROUP].

    A scale is rounded up, so that numbers are at most 127. It is NaN if a number of its group is not finite.
    """
    groups = x.float().reshape(*x.shape[:-1], -1, KV_GROUP)
    top = groups.abs().amax(-1)
    bits = (top.clamp(max=_MAX_KV) / 127).view(torch.int32)
    scales = (((bits + 0xFFFF) >> 16) << 16).view(torch.float32)
    factors = torch.where(scales > 1e-35, scales.reciprocal(), 0)
    numbers = (groups * factors[..., None]).round().clamp(-127, 127).nan_to_num().to(torch.int8)
    return numbers.flatten(-2), torch.where(top.isfinite(), scales, torch.nan).bfloat16()


def dequantize_kv(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the keys or values of `quantize_kv` in `dtype`."""
    groups = numbers.float().reshape(*numbers.shape[:-1], -1, KV_GROUP)
    return (groups * scales.float()[..., None]).flatten(-2).to(dtype)


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Return keys or values in float8_e4m3fn. Numbers beyond its range become its largest number."""
    return x.float().clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Compute the causal attention of new tokens over their sequences' pages: prompt chunks and decodes in one batch.

    The new tokens of a sequence are its last ones, and the cache contains their keys and values.

    Args:
        query: [num_tokens, num_heads, head_dim], sequence after sequence.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        block_table: integer [num_seqs, max_blocks]: the block of each block_size tokens of a sequence.
        seq_lens: integer [num_seqs], tokens of each sequence, including the new ones.
        query_start_loc: integer [num_seqs + 1], start of each sequence's queries.
        scale: factor of the scores, usually head_dim ** −0.5.
        window: tokens that a token attends to, itself included; 0: all.
        soft_cap: c, if above 0: scores become c · tanh(score / c).

    Returns:
        [num_tokens, num_heads, head_dim], dtype of query.
    """
    out = torch.empty_like(query)
    block_size = key_cache.shape[1]
    group = query.shape[1] // key_cache.shape[2]
    starts = query_start_loc.tolist()
    for index, length in enumerate(seq_lens.tolist()):
        begin, end = starts[index], starts[index + 1]
        blocks = block_table[index, : -(-length // block_size)].long()
        keys = key_cache[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)
        values = value_cache[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].float(), keys.float()) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        positions = torch.arange(length, device=query.device)
        own = positions[length - (end - begin) :, None]
        hidden = positions[None] > own
        if window:
            hidden |= positions[None] <= own - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values.float()).to(query.dtype)
    return out
