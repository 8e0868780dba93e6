"""The comparison of the C kernels with PyTorch on random data. The attention backend has its own check."""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

from inference_worker.engine.quantization.quantize import quantize_head
from kernels import reference
from kernels.native import operators
from kernels.native.library import Library

_ROWS = 37  # more than a part of each operator, and no multiple of one
_MAX_ERROR = 0.02  # relative to the largest number


@cache
def find_wrong_operator(library: Library) -> str:
    """Return the name of an operator whose results differ from those of PyTorch, or an empty text."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    inputs, outputs = 3 * operators.UNIT, 70
    x, weight, bias, residual = randn(_ROWS, inputs), randn(outputs, inputs), randn(outputs), randn(_ROWS, outputs)
    product = functional.linear(x.float(), weight.float(), bias.float())
    if _differ(operators.PackedLinear(library, weight, bias)(x, residual), product + residual.float()):
        return "the product"
    if _differ(operators.PackedLinear(library, weight, bias)(x, residual.float()), product + residual.float()):
        return "the product in float32"
    gate, up = product.chunk(2, dim=-1)
    if _differ(operators.PackedLinear(library, weight, bias, "silu")(x), functional.silu(gate) * up):
        return "the gated product"
    if _differ(operators.PackedLinear(library, weight, bias, "gelu")(x), functional.gelu(product)):
        return "the product with GELU"
    codes, scales = torch.randint(-7, 8, (outputs, inputs), generator=generator), randn(outputs, 3).float().abs()
    exact = functional.linear(x.float(), (codes.view(outputs, 3, -1) * scales[..., None]).flatten(1), bias.float())
    if _differ(operators.PackedLinearInt8(library, codes.to(torch.int8), scales, bias)(x), exact):
        return "the product of 8-bit integers"
    head = quantize_head(weight)
    logits = operators.RescoredLogits(library, weight, operators.PackedLinearInt8(library, head.values, head.scales))(x)
    if _differ(logits, functional.linear(x.float(), weight.float())):
        return "the logits"
    packed = (codes[:, ::2] + 8 | codes[:, 1::2] + 8 << 4).to(torch.uint8)
    if _differ(operators.PackedLinearInt4(library, packed, scales, None, operators.UNIT, bias)(x), exact):
        return "the product with 4-bit weights"
    scale, wide = randn(inputs).float(), x.float()
    norm = reference.rms_norm(wide, scale, 1e-5)
    if _differ(operators.rms_norm(library, x, scale, 1e-5), norm):
        return "the norm"
    if _differ(operators.rms_norm(library, wide, scale, 1e-5, wide), norm + wide):
        return "the norm in float32"
    mean = functional.layer_norm(x.float(), (inputs,), scale, scale, 1e-5)
    if _differ(operators.layer_norm(library, x, scale, scale, 1e-5), mean):
        return "the layer normalization"
    queries, keys, values = x.view(_ROWS, 3, 1, -1).unbind(1)
    query, key, value = (part.float().transpose(0, 1) for part in (queries, keys, values))
    attended = functional.scaled_dot_product_attention(query, key, value)[0]
    if _differ(operators.SelfAttention(library, [_ROWS]).attend(queries, keys, values, operators.UNIT**-0.5), attended):
        return "the attention of encoders"
    if _differ(wide.gather(1, operators.argmax(library, wide)[:, None]), wide.amax(-1, keepdim=True)):
        return "the maximum"
    heads, cos, sin = x.view(_ROWS, 3, -1).clone(), randn(_ROWS, 16).float(), randn(_ROWS, 16).float()
    want = reference.apply_rope(heads.float(), cos, sin)
    operators.rotate(library, heads, cos, sin)
    return "the rotation" if _differ(heads, want) else ""


def _differ(got: torch.Tensor, want: torch.Tensor) -> bool:
    error = float((got.float() - want).abs().nan_to_num(float("inf")).max())
    return error > _MAX_ERROR * float(want.abs().max())
