"""compressed-tensors: 8-bit and 4-bit integers, and 8-bit floating-point numbers.

Integers of 8 bits and floats: weight [outputs, inputs]. Packed integers: weight_packed, int32 [outputs, inputs · bits /
32], unsigned. weight_scale: one number, [outputs, 1], [outputs, groups] or a number for each block.
"""

from __future__ import annotations

import torch

from inference_worker.checkpoints.model_config import CheckpointFormat, ModelError
from inference_worker.engine.loading.loader import Weights
from inference_worker.engine.quantization import fp8
from inference_worker.engine.quantization.weights import (
    Int4Weight,
    Int8Weight,
    Weight,
    pack_int4,
    split_rows,
    unpack_words,
)

MARK = "weight_scale"  # the tensor that a quantized layer has
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


def load(weights: Weights, name: str, shape: tuple[int, int], form: CheckpointFormat) -> Weight:
    """Return the weight of the layer `name`, [outputs, inputs]."""
    if form.is_float:
        return fp8.load(weights, name, shape, form)
    outputs, inputs = shape
    size, bits = form.group_size or inputs, form.bits
    groups = -(-inputs // size)
    scales = _read_scales(weights, name, outputs, groups)
    if form.is_packed:
        per_word = 32 // bits
        words = weights.read(f"{name}.weight_packed", (outputs, -(-inputs // per_word)), (torch.int32,))
        values = unpack_words(words, bits)[:, :inputs]
        zeros = torch.full_like(scales, 1 << (bits - 1))
        if not form.is_symmetric:
            packed = weights.read(f"{name}.weight_zero_point", (-(-outputs // per_word), groups), (torch.int32,))
            zeros = unpack_words(packed.T.contiguous(), bits).T[:outputs].float().contiguous()
    else:
        values = weights.read(f"{name}.weight", shape, (torch.int8,))
        zeros = torch.zeros_like(scales)
        if not form.is_symmetric:
            zeros = weights.read(f"{name}.weight_zero_point", (outputs, groups), (torch.int8,)).float()
        elif groups == 1 and form.activation_bits == 8:
            return Int8Weight(values, scales, weights.dtype)
    in_order = torch.arange(inputs, device=values.device) // size
    index = in_order
    if weights.has(f"{name}.weight_g_idx"):
        index = weights.read(f"{name}.weight_g_idx", (inputs,), (torch.int32,)).long()
        if not 0 <= int(index.min()) <= int(index.max()) < groups:
            raise ModelError(f"tensor {name}.weight_g_idx names a group that does not exist")
    if bits == 4 and inputs % size == inputs % 2 == 0 and torch.equal(index, in_order):
        return Int4Weight(pack_int4(values), scales, zeros, size, weights.dtype)
    rows = split_rows(inputs, values, zeros, scales)
    return torch.cat([((part - zero[:, index]) * scale[:, index]).to(weights.dtype) for part, zero, scale in rows])


def _read_scales(weights: Weights, name: str, outputs: int, groups: int) -> torch.Tensor:
    """Return the scales in float32, [outputs, groups]."""
    entry = weights.entry(f"{name}.weight_scale")
    is_single = entry is not None and entry.shape in ((), (1,))
    shape = entry.shape if entry is not None and is_single else (outputs, groups)
    scales = weights.read(f"{name}.weight_scale", shape, _SCALES).float()
    return scales.reshape(1, 1).expand(outputs, groups).contiguous() if is_single else scales
