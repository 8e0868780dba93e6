"""Blocks of a GGUF file, kept as they are: a layer has one tensor, named by the type of its blocks.

The tensor is uint8 [outputs, bytes of a row]. Blocks of 4 bits become `Int4Weight`, and others `Int8Weight`. Both have
groups of 32 inputs. Nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from inference_worker.checkpoints.gguf_blocks import KEPT_BLOCKS
from inference_worker.checkpoints.model_config import CheckpointFormat
from inference_worker.engine.loading.loader import Weights
from inference_worker.engine.quantization.weights import (
    Int4Weight,
    Int8Weight,
    Weight,
    concatenate,
    pack_int4,
    require_multiples,
    split_rows,
)

MARKS = tuple(KEPT_BLOCKS)
_GROUP = 32  # inputs that share a scale
_TINY = 1e-30


def load(weights: Weights, name: str, shape: tuple[int, int], form: CheckpointFormat) -> Weight:
    """Return the weight of the layer `name`, [outputs, inputs]."""
    outputs, inputs = shape
    kind = next(kind for kind in MARKS if weights.has(f"{name}.{kind}"))
    block = KEPT_BLOCKS[kind]
    require_multiples(name, shape, outputs=1, inputs=block.numbers)
    row_bytes = inputs // block.numbers * block.num_bytes
    blocks = weights.read(f"{name}.{kind}", (outputs, row_bytes), (torch.uint8,)).view(outputs, -1, block.num_bytes)
    return concatenate([_DECODERS[kind](rows, weights.dtype) for (rows,) in split_rows(inputs, blocks)])


def _q8_0(blocks: torch.Tensor, dtype: torch.dtype) -> Weight:
    return Int8Weight(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _half(blocks, 0), dtype)


def _q5_0(blocks: torch.Tensor, dtype: torch.dtype) -> Weight:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = (blocks[..., 2:6, None] >> shifts & 1).flatten(-2)
    values = (_nibbles(blocks[..., 6:]) | high << 4).to(torch.int8) - 16
    return Int8Weight(values.flatten(1), _half(blocks, 0), dtype)


def _q4_0(blocks: torch.Tensor, dtype: torch.dtype) -> Weight:
    scales = _half(blocks, 0)
    return _int4(_nibbles(blocks[..., 2:]), scales, torch.full_like(scales, -8) * scales, dtype)


def _q4_1(blocks: torch.Tensor, dtype: torch.dtype) -> Weight:
    return _int4(_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2), dtype)


def _q4_k(blocks: torch.Tensor, dtype: torch.dtype) -> Weight:
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]  # 8 scales and 8 minima of 6 bits
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1).float()
    minima = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), -1).float()
    scale, minimum = _half(blocks, 0), _half(blocks, 2)
    values = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32))
    return _int4(values, (scale[..., None] * scales).flatten(1), (-minimum[..., None] * minima).flatten(1), dtype)


def _int4(values: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor, dtype: torch.dtype) -> Weight:
    """Return the weight value · scale + minimum."""
    is_constant = scales.abs() < _TINY
    scales = torch.where(is_constant, 1.0, scales)
    values = values.reshape(len(scales), -1, _GROUP).masked_fill(is_constant[..., None], 0)
    return Int4Weight(pack_int4(values.flatten(1)), scales, -minima / scales, _GROUP, dtype)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the float16 number of each block as float32, [outputs, blocks of a row]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)[..., 0].float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the lower 4 bits of the last dimension, and then the upper ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


_DECODERS: dict[str, Callable[[torch.Tensor, torch.dtype], Weight]] = {
    "q8_0": _q8_0,
    "q5_0": _q5_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q4_k": _q4_k,
}
