"""The operators of the C library on tensors. All tensors are bfloat16 on the CPU, unless stated otherwise."""

from __future__ import annotations

from ctypes import byref
from typing import Literal

import torch

from kernels.native.library import (
    AttentionArguments,
    Library,
    LinearArguments,
    NormArguments,
    PackingArguments,
    RotationArguments,
)

Activation = Literal["silu", "gelu_tanh"]

UNIT = 32  # the inputs of a product, the tokens of a block and the numbers of a head are multiples
MAX_HEAD_DIM = 256

_PART_ROWS = 32  # queries of one part of attention
_COLUMNS = 32
_ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2}


class PackedLinear:
    """x @ weightᵀ + bias with a weight in the tiles' layout. The given weight is not kept.

    With `activation`, the weight's first half is gate and the second half is up, and the result is
    activation(gate) · up.
    """

    def __init__(
        self,
        library: Library,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: Activation | None = None,
    ) -> None:
        outputs, inputs = weight.shape
        if weight.dtype != torch.bfloat16 or inputs % UNIT or (activation and outputs % 2):
            raise ValueError(f"a weight [{outputs}, {inputs}] of {weight.dtype} cannot be packed")
        self._library = library
        self._inputs, self._outputs, self._activation = inputs, outputs, _ACTIVATIONS[activation]
        self._width = outputs // 2 if activation else outputs
        columns = _COLUMNS // 2 if activation else _COLUMNS
        self._bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
        self._bias_address = None if self._bias is None else self._bias.data_ptr()
        numbers = -(-self._width // columns) * _COLUMNS * inputs
        self._packed = library.memory.empty(numbers, dtype=torch.bfloat16)
        weight = weight.contiguous()
        packing = PackingArguments(weight.data_ptr(), self._packed.data_ptr(), outputs, inputs, self._activation)
        library.pack(byref(packing))

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product for x [rows, inputs], plus `residual` [rows, outputs]."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        out = x.new_empty(len(x), self._width)
        address, stride = None, 0
        if residual is not None:
            _require(residual.shape == out.shape and residual.stride(-1) == 1 and not self._activation)
            address, stride = residual.data_ptr(), residual.stride(0)
        _require(x.dtype == torch.bfloat16 and x.shape[1] == self._inputs)
        arguments = LinearArguments(
            x.data_ptr(), self._packed.data_ptr(), self._bias_address, address, out.data_ptr(),
            len(x), self._inputs, self._outputs, x.stride(0), stride, self._width, self._activation,
        )  # fmt: skip
        self._library.linear(byref(arguments))
        return out


def rms_norm(library: Library, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the root-mean-square normalization of x [..., width] with `weight`, float32 [width]."""
    x = x.contiguous()
    _require(x.dtype == torch.bfloat16 and weight.dtype == torch.float32 and x.shape[-1] == len(weight))
    out = torch.empty_like(x)
    width = len(weight)
    arguments = NormArguments(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps)
    library.norm(byref(arguments))
    return out


def rotate(library: Library, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate x [rows, heads, head_dim] in place by halves of its first 2 · n numbers of each head.

    Args:
        x: heads are contiguous.
        cos, sin: float32 [rows, n], contiguous.
    """
    rows, heads, head_dim = x.shape
    _require(x.dtype == torch.bfloat16 and x.stride()[1:] == (head_dim, 1))
    for factors in (cos, sin):
        _require(factors.dtype == torch.float32 and factors.is_contiguous() and factors.shape == (rows, cos.shape[1]))
    _require(2 * cos.shape[1] <= head_dim)
    arguments = RotationArguments(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, heads, head_dim, 2 * cos.shape[1], x.stride(0)
    )
    library.rotation(byref(arguments))


class AttentionStep:
    """The data of a step's attention that all layers share.

    Args:
        query_start_loc: integers [sequences + 1], the first token of each sequence.
        seq_lens: integers [sequences], tokens of each sequence, including the new ones.
        block_table: integers [sequences, max_blocks].
        slot_mapping: integers [tokens].
    """

    def __init__(
        self,
        library: Library,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        query_start_loc, seq_lens, block_table, slot_mapping = sizes = [
            x.to(torch.int32).contiguous() for x in (query_start_loc, seq_lens, block_table, slot_mapping)
        ]
        _require(heads % kv_heads == 0 and head_dim <= MAX_HEAD_DIM and head_dim % UNIT == block_size % UNIT == 0)
        self._library = library
        rows = query_start_loc.diff() * (heads // kv_heads)
        parts = torch.zeros_like(query_start_loc)
        torch.cumsum((rows + (_PART_ROWS - 1)).div_(_PART_ROWS, rounding_mode="floor") * kv_heads, 0, out=parts[1:])
        self._kept = (*sizes, parts)
        self._shape = (heads, kv_heads, head_dim)
        self._arguments = AttentionArguments(
            slots=slot_mapping.data_ptr(),
            table=block_table.data_ptr(),
            starts=query_start_loc.data_ptr(),
            lengths=seq_lens.data_ptr(),
            parts=parts.data_ptr(),
            sequences=len(seq_lens),
            tokens=len(slot_mapping),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            table_stride=block_table.stride(0),
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> torch.Tensor:
        """Write keys and values to one layer's cache, and return the attention [tokens, heads · head_dim].

        Args:
            query: [tokens, heads, head_dim]. As key and value, it may be a view with a larger stride of tokens.
            key, value: [tokens, kv_heads, head_dim], with equal strides.
            cache: [blocks, 2 · kv_heads · block_size · head_dim], finite numbers.
            window: tokens that a token attends to, including itself; 0: all.
            soft_cap: scores are limited to ±soft_cap with tanh; 0: no limit.
        """
        heads, kv_heads, head_dim = self._shape
        tokens = self._arguments.tokens
        _require(query.shape == (tokens, heads, head_dim) and key.shape == value.shape == (tokens, kv_heads, head_dim))
        if key.stride() != value.stride():
            key, value = key.contiguous(), value.contiguous()
        for x in (query, key, value):
            _require(x.dtype == torch.bfloat16 and (x.stride()[1:] == (head_dim, 1)))
        _require(cache.is_contiguous() and cache.dtype == torch.bfloat16)
        out = query.new_empty(tokens, heads * head_dim)
        arguments = self._arguments
        arguments.query, arguments.key, arguments.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        arguments.out, arguments.cache = out.data_ptr(), cache.data_ptr()
        arguments.query_stride, arguments.kv_stride = query.stride(0), key.stride(0)
        arguments.scale, arguments.window, arguments.soft_cap = scale, window, soft_cap
        self._library.attention(byref(arguments))
        return out


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError("want tensors of the documented shapes, types and strides")
