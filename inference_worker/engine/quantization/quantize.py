"""Quantization of weights when a model is loaded, by rounding to the nearest number."""

from __future__ import annotations

import torch

from inference_worker.contract.engine_config import QuantizationName
from inference_worker.engine.quantization.weights import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Weight,
    concatenate,
    pack_int4,
    split_rows,
)

INT8_GROUP_SIZE = 32  # inputs; with one scale for all of them, perplexity grows by 3 % instead of 0.5 %
HEAD_GROUP_SIZE = 64  # the errors of logits are small beside the distance of the tokens that are computed again
_LEAST_TOP = 120  # smaller ones seldom have the smallest error
GROUP_SIZES: dict[str, int] = {"int4": 32, "int4-g64": 64, "int4-g128": 128}
_FP8_MAX = 448.0
_TINY = 1e-12  # smallest scale, so that a weight of zeros has one


def quantize(weight: torch.Tensor, name: QuantizationName) -> Weight:
    """Return the weight [outputs, inputs] quantized as `name`. A weight whose inputs do not fit stays as it is."""
    if name == "none" or (name in GROUP_SIZES and weight.shape[1] % GROUP_SIZES[name]):
        return weight
    return concatenate([_quantize_rows(rows, name) for (rows,) in split_rows(weight.shape[1], weight)])


def _quantize_rows(weight: torch.Tensor, name: QuantizationName) -> Weight:
    inputs = weight.shape[1]
    if name == "int8":
        values, scales = _weight_to_int8(weight, 1 if inputs % INT8_GROUP_SIZE else inputs // INT8_GROUP_SIZE)
        return Int8Weight(values, scales, weight.dtype)
    if name == "fp8":
        scales = scales_of(weight, _FP8_MAX)
        values = (weight.float() / scales).to(torch.float8_e4m3fn)
        return Fp8Weight(values, scales[:, 0].contiguous(), weight.dtype)
    return _to_int4(weight, GROUP_SIZES[name])


def quantize_head(weight: torch.Tensor) -> Int8Weight:
    """Return the weight of a head [tokens, width] in 8 bits, in the largest groups of at most HEAD_GROUP_SIZE inputs.

    It is quantized in parts, since its copy in float32 would be large.
    """
    count, width = weight.shape
    size = max(size for size in range(INT8_GROUP_SIZE, HEAD_GROUP_SIZE + 1, INT8_GROUP_SIZE) if width % size == 0)
    values = torch.empty(count, width, dtype=torch.int8, device=weight.device)
    scales = torch.empty(count, width // size, dtype=torch.bfloat16, device=weight.device)
    for rows, out, out_scales in split_rows(width, weight, values, scales):
        part, part_scales = _weight_to_int8(rows, width // size)
        out.copy_(part)
        out_scales.copy_(part_scales)
    return Int8Weight(values, scales, weight.dtype)


def _weight_to_int8(weight: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight in 8 bits, [outputs, inputs], and its scales, bfloat16 [outputs, groups].

    A group's scale is the one with the smallest squared error, of those by which its largest number becomes about 127,
    126, and so on down to _LEAST_TOP.
    """
    parts = weight.float().view(len(weight), groups, -1)
    tops = scales_of(parts, 1.0)
    scales, errors = tops, torch.full_like(tops, torch.inf)
    for top in range(127, _LEAST_TOP - 1, -1):
        scale = (tops / top).bfloat16().float()
        error = _round(parts, scale).mul_(scale).sub_(parts).square_().sum(-1, keepdim=True)
        better = error < errors
        scales, errors = torch.where(better, scale, scales), torch.where(better, error, errors)
    return _round(parts, scales).to(torch.int8).view(weight.shape), scales[..., 0].bfloat16()


def _round(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers in 8 bits. A scale that was rounded can make the largest one 128."""
    return (values / scales).round_().clamp_(-127, 127)


def scales_of(values: torch.Tensor, maximum: float) -> torch.Tensor:
    """Return the scales of rows, float32 [..., 1], by which their numbers become at most `maximum`."""
    return values.abs().amax(-1, keepdim=True).float().clamp_min_(_TINY) / maximum


def to_int8(values: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in 8 bits, [rows, width], and their scales, float32 [rows, groups]."""
    parts = values.float().view(len(values), groups, -1)
    scales = scales_of(parts, 127.0)
    return (parts / scales).round_().to(torch.int8).view(values.shape), scales[..., 0]


def _to_int4(weight: torch.Tensor, group_size: int) -> Int4Weight:
    """Return the weight in 4 bits. Each group's minimum is 0 and its maximum 15."""
    groups = weight.float().view(len(weight), -1, group_size)
    low, high = groups.aminmax(dim=-1)
    scales = ((high - low) / 15).clamp_min_(_TINY)
    values = ((groups - low[..., None]) / scales[..., None]).round_().clamp_(0, 15)
    return Int4Weight(pack_int4(values.flatten(1)), scales, -low / scales, group_size, weight.dtype)
