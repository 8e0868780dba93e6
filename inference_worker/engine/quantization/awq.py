"""AWQ: 4-bit integers with zero points, in the layout of its GEMM kernels.

qweight, qzeros: int32 [inputs or groups, outputs / 8], with 8 outputs in one number in the order 0 2 4 6 1 3 5 7.
scales: [groups, outputs].
"""

from __future__ import annotations

import math

import torch

from inference_worker.checkpoints.model_config import CheckpointFormat
from inference_worker.engine.loading.loader import Weights
from inference_worker.engine.quantization.weights import Int4Weight, Weight, pack_int4, require_multiples, unpack_words

MARK = "qweight"  # the tensor that a quantized layer has
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # place of each output in a number


def load(weights: Weights, name: str, shape: tuple[int, int], form: CheckpointFormat) -> Weight:
    """Return the weight of the layer `name`, [outputs, inputs]."""
    outputs, inputs = shape
    size = form.group_size or inputs
    require_multiples(name, shape, outputs=8, inputs=math.lcm(size, 2))
    groups, words = inputs // size, outputs // 8

    def unpack(part: str, rows: int) -> torch.Tensor:
        values = unpack_words(weights.read(f"{name}.{part}", (rows, words), (torch.int32,)), 4)
        return values.view(rows, words, 8)[..., _PLACES].reshape(rows, outputs)

    scales = weights.read(f"{name}.scales", (groups, outputs), (torch.float16, torch.bfloat16))
    packed = pack_int4(unpack("qweight", inputs).T)
    zeros = unpack("qzeros", groups).T.float().contiguous()
    return Int4Weight(packed, scales.T.float().contiguous(), zeros, size, weights.dtype)
