"""FP8: numbers of type e4m3 with a scale for all of them, for each output or for each block.

weight: float8_e4m3fn [outputs, inputs]. weight_scale: one number, [outputs, 1] or one for each block.
weight_scale_inv: one for each block, [outputs / height, inputs / width]. The weight is the number times its scale.
"""

from __future__ import annotations

import torch

from inference_worker.checkpoints.model_config import CheckpointFormat
from inference_worker.engine.loading.loader import Weights
from inference_worker.engine.quantization.weights import Fp8Weight, Weight, split_rows

MARK = "weight_scale_inv"  # the tensor that a quantized layer has, or `weight_scale`
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


def load(weights: Weights, name: str, shape: tuple[int, int], form: CheckpointFormat) -> Weight:
    """Return the weight of the layer `name`, [outputs, inputs]."""
    outputs, inputs = shape
    values = weights.read(f"{name}.weight", shape, (torch.float8_e4m3fn,))
    scale_name = next(
        (part for part in (f"{name}.weight_scale_inv", f"{name}.weight_scale") if weights.has(part)),
        f"{name}.weight_scale",
    )
    if form.block is not None:
        height, width = form.block
        blocks = -(-outputs // height), -(-inputs // width)
        scales = weights.read(scale_name, blocks, _SCALES).float()
        rows = split_rows(inputs, values, scales.repeat_interleave(height, 0)[:outputs])
        wide = ((part.float(), scale.repeat_interleave(width, 1)[:, :inputs]) for part, scale in rows)
        return torch.cat([(part * scale).to(weights.dtype) for part, scale in wide])
    entry = weights.entry(scale_name)
    single = entry is not None and entry.shape in ((), (1,))
    scales = weights.read(scale_name, entry.shape if entry is not None and single else (outputs, 1), _SCALES)
    return Fp8Weight(values, scales.float().reshape(-1).expand(outputs).contiguous(), weights.dtype)
