"""RMSNorm of each row, fused with the preceding residual addition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.checks import require, require_dtype

MAX_WIDTH = 32_768  # a row must fit into registers


@triton.jit
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    tile: tl.constexpr,
    add: tl.constexpr,
) -> None:
    """Compute one row in one program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, tile)
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if add:
        at = residual_ptr + row * width + column
        x += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(at, rounded, mask=inside)
        x = rounded.to(tl.float32)  # the norm of the rounded sum, as without fusion
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, 0) / width
    normed = (x * tl.rsqrt(mean + eps)).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * width + column, (normed * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the RMSNorm of x, or of x + residual, computed in float32. `residual` is overwritten with the sum.

    Args:
        x: [num_tokens, width]; the row stride is free. Width up to 32,768.
        weight: [width].
        eps: added to the mean square.
        residual: [num_tokens, width], contiguous, dtype of x: overwritten with x + residual.
        out: [num_tokens, width], contiguous, dtype of x; may be `x`; allocated if not given.

    Raises:
        ValueError, TypeError: a shape, stride or dtype is not as above.
    """
    require(x.ndim == 2 and x.stride(-1) == 1, "x must be [num_tokens, width], contiguous in its rows")
    num_tokens, width = x.shape
    require(width <= MAX_WIDTH, f"rows of {width} are wider than {MAX_WIDTH}")
    require(weight.shape == (width,) and weight.is_contiguous(), f"weight must be [{width}]")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    for name, tensor in (("out", out), ("residual", residual)):
        if tensor is not None:
            require(tensor.shape == x.shape and tensor.is_contiguous(), f"{name} must be contiguous and shaped like x")
            require_dtype(name, tensor, x.dtype)
    if num_tokens == 0:
        return out
    tile = triton.next_power_of_2(width)
    _rms_norm_kernel[(num_tokens,)](
        x, x if residual is None else residual, weight, out, x.stride(0), eps,
        width=width, tile=tile, add=residual is not None, num_warps=min(16, max(1, tile // 512)),
    )  # fmt: skip
    return out
