"""SiLU·mul, the gate of a Llama-like feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.checks import require, require_dtype

TILE = 1024


@triton.jit
def _silu_mul_kernel(
    x_ptr: tl.tensor, out_ptr: tl.tensor, x_stride: tl.tensor, width: tl.constexpr, tile: tl.constexpr
) -> None:
    """Compute `tile` columns of one row in one program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = column < width
    gate = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    # exp2 of the negated gate may overflow to infinity, and gate / inf = −0 is correct.
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + column, result.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return silu(gate) · up for x with gate before up, computed in float32.

    Args:
        x: [num_tokens, 2 × width]; the row stride is free.
        out: [num_tokens, width], contiguous, dtype of x; allocated if not given.

    Raises:
        ValueError, TypeError: a shape, stride or dtype is not as above.
    """
    require(x.ndim == 2 and x.stride(-1) == 1, "x must be [num_tokens, 2 × width], contiguous in its rows")
    num_tokens, width = x.shape[0], x.shape[1] // 2
    require(x.shape[1] == 2 * width, f"x must have an even width, not {x.shape[1]}")
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device) if out is None else out
    require(out.shape == (num_tokens, width) and out.is_contiguous(), f"out must be contiguous [{num_tokens}, {width}]")
    require_dtype("out", out, x.dtype)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(width, TILE))
        _silu_mul_kernel[grid](x, out, x.stride(0), width=width, tile=TILE, num_warps=4)
    return out
