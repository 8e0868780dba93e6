"""GPTQ: 4-bit or 8-bit integers with zero points, in groups of inputs in order or in the order of activations.

qweight: int32 [inputs · bits / 32, outputs]. qzeros: int32 [groups, outputs · bits / 32]. scales: [groups, outputs].
g_idx: int32 [inputs], the group of each input.
"""

from __future__ import annotations

import torch

from inference_worker.checkpoints.model_config import CheckpointFormat, ModelError
from inference_worker.engine.loading.loader import Weights
from inference_worker.engine.quantization.weights import (
    Int4Weight,
    Weight,
    pack_int4,
    require_multiples,
    split_rows,
    unpack_words,
)

MARK = "qweight"  # the tensor that a quantized layer has


def load(weights: Weights, name: str, shape: tuple[int, int], form: CheckpointFormat) -> Weight:
    """Return the weight of the layer `name`, [outputs, inputs]."""
    outputs, inputs = shape
    size, bits = form.group_size or inputs, form.bits
    groups, per_word = -(-inputs // size), 32 // bits
    require_multiples(name, shape, outputs=per_word, inputs=per_word)
    words = weights.read(f"{name}.qweight", (inputs // per_word, outputs), (torch.int32,))
    values = unpack_words(words.T.contiguous(), bits)
    words = weights.read(f"{name}.qzeros", (groups, outputs // per_word), (torch.int32,))
    # The stored zero points wrap around: 0 is stored as the maximum.
    zeros = (unpack_words(words, bits) + form.zero_offset) & ((1 << bits) - 1)
    scales = weights.read(f"{name}.scales", (groups, outputs), (torch.float16, torch.bfloat16, torch.float32))
    scales, zeros = scales.T.float().contiguous(), zeros.T.float().contiguous()
    in_order = torch.arange(inputs, dtype=torch.int32, device=words.device) // size
    index = in_order
    if weights.has(f"{name}.g_idx"):
        index = weights.read(f"{name}.g_idx", (inputs,), (torch.int32,))
        if not 0 <= int(index.min()) <= int(index.max()) < groups:
            raise ModelError(f"tensor {name}.g_idx names a group that does not exist")
    if bits == 4 and inputs % size == 0 and torch.equal(index, in_order):
        return Int4Weight(pack_int4(values), scales, zeros, size, weights.dtype)
    rows = split_rows(inputs, values, zeros, scales)
    return torch.cat([((part - zero[:, index]) * scale[:, index]).to(weights.dtype) for part, zero, scale in rows])
