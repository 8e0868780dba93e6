"""The operators of the C library on tensors. All tensors are bfloat16 on the CPU, unless stated otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof, byref, c_void_p
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np
import torch

from kernels.native.library import (
    AttentionArguments,
    LayerArguments,
    LayerNormArguments,
    LayersArguments,
    Library,
    LinearArguments,
    LookupArguments,
    MaximaArguments,
    NormArguments,
    PackingArguments,
    RescoringArguments,
    RotationArguments,
    SelfAttentionArguments,
)

Activation = Literal["silu", "gelu_tanh", "gelu"]

UNIT = 32  # the inputs of a product, the tokens of a block and the numbers of a head are multiples
MAX_HEAD_DIM = 256

_PART_ROWS = 32  # queries of one part of attention
_PART_QUERIES = 128  # the same, without a cache
_COLUMNS = 32
_ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}
_GATES = ("silu", "gelu_tanh")
_BFLOAT16, _INT8, _INT4 = range(3)  # formats of weights
# Numbers of a weight that are packed at a time. Larger copies grow the heap while a model is loaded.
_PART_NUMBERS = 1 << 17
MAX_GROUP = 65_536  # inputs whose products have a 32-bit sum


class Product:
    """x @ weightᵀ + bias with a weight in the tiles' layout. The given weight is not kept.

    With an activation of silu or gelu_tanh, the weight's first half is gate and the second half is up, and the result
    is activation(gate) · up. With gelu, the result is gelu(product).
    """

    def __init__(
        self,
        library: Library,
        shape: tuple[int, int],
        bias: torch.Tensor | None,
        activation: Activation | None,
        weight_format: int,
        group: int = 0,
    ) -> None:
        self._library, self._format = library, weight_format
        self._outputs, self._inputs = shape
        self._gated = activation in _GATES
        self._width = self._outputs // 2 if self._gated else self._outputs
        self._groups = self._inputs // group if group else 0
        # For each row: numbers of the output, bytes of the converted input, and numbers of its scales and sums.
        units = self._groups if weight_format == _INT8 else self._inputs // UNIT
        code_bytes = self._inputs * ({_INT8: 1, _INT4: 2}.get(weight_format) or library.wide_bytes())
        self.row_sizes = self._width, code_bytes, 2 * units if group else 0
        self._bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
        self._kept: list[torch.Tensor] = []
        self._template = LinearArguments(
            bias=_address(self._bias), inputs=self._inputs, outputs=self._outputs, out_stride=self._width,
            activation=_ACTIVATIONS[activation], format=weight_format, group=group,
        )  # fmt: skip

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product for x [rows, inputs], plus `residual` [rows, outputs].

        A residual in float32 gives a result in float32.
        """
        if residual is not None and residual.dtype == torch.float32:
            return self.in_float32(x, residual)
        out = x.new_empty(len(x), self._width)
        arguments = LinearArguments.from_buffer_copy(self._template)
        arguments.out = out.data_ptr()
        if residual is not None:
            _require(residual.shape == out.shape and residual.dtype == out.dtype and residual.stride(-1) == 1)
            _require(not self._template.activation)
            arguments.residual, arguments.residual_stride = residual.data_ptr(), residual.stride(0)
        self._multiply(x, arguments)
        return out

    def in_float32(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product for x [rows, inputs], plus `residual` [rows, outputs], in float32.

        The product has no activation.
        """
        _require(not self._template.activation)
        out = torch.empty(len(x), self._width, dtype=torch.float32)
        arguments = LinearArguments.from_buffer_copy(self._template)
        arguments.wide_out = out.data_ptr()
        if residual is not None:
            _require(residual.shape == out.shape and residual.dtype == out.dtype and residual.stride(-1) == 1)
            arguments.wide_residual, arguments.residual_stride = residual.data_ptr(), residual.stride(0)
        self._multiply(x, arguments)
        return out

    def _multiply(self, x: torch.Tensor, arguments: LinearArguments) -> None:
        """Set the arguments of the input x [rows, inputs], and compute."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        rows, inputs = x.shape
        _require(x.dtype == torch.bfloat16 and inputs == self._inputs)
        arguments.x, arguments.x_stride, arguments.rows = x.data_ptr(), x.stride(0), rows
        _, code_bytes, scale_count = self.row_sizes
        if code_bytes:
            row_scales = torch.empty(rows * scale_count, dtype=torch.float32)
            codes = torch.empty(rows * code_bytes, dtype=torch.uint8)
            arguments.row_scales, arguments.codes = row_scales.data_ptr(), codes.data_ptr()
        self._library.linear(byref(arguments))

    @property
    def template(self) -> LinearArguments:
        """Return the arguments without those of a call."""
        return self._template

    def _store(self, name: str, rows: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Keep rows of the outputs in the library's memory, and set the argument `name` to their address.

        Args:
            rows: [outputs, width].
            convert: converts rows in the order of the tiles, [tiles, columns, width]. Missing outputs are 0. It is
                called with some of the tiles at a time, so that copies are small.
        """
        columns = _COLUMNS // 2 if self._gated else _COLUMNS
        tiles = -(-self._width // columns)
        halves = rows.view(-1, self._width, rows.shape[1])  # gate and up, or all outputs
        step = max(1, _PART_NUMBERS // (_COLUMNS * rows.shape[1]))
        kept = None
        for start in range(0, tiles, step):
            part = halves[:, start * columns : (start + step) * columns]
            count = -(-part.shape[1] // columns)
            padded = part.new_zeros(len(part), count * columns, rows.shape[1])
            padded[:, : part.shape[1]] = part
            in_tiles = padded.view(len(part), count, columns, -1).transpose(0, 1).reshape(count, _COLUMNS, -1)
            values = convert(in_tiles)
            if kept is None:
                kept = self._library.memory.allocate(tiles, *values.shape[1:], dtype=values.dtype)
                self._kept.append(kept)
                setattr(self._template, name, kept.data_ptr())
            kept[start : start + count] = values


class PackedLinear(Product):
    """A product with a weight in bfloat16.

    Args:
        weight: in bfloat16, or without an activation in a wider type, which is converted in parts.
    """

    def __init__(
        self,
        library: Library,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: Activation | None = None,
    ) -> None:
        outputs, inputs = weight.shape
        is_wide = weight.dtype != torch.bfloat16
        is_valid = weight.is_floating_point() and not (is_wide and activation)
        if not is_valid or inputs % UNIT or (activation in _GATES and outputs % 2):
            raise ValueError(f"a weight [{outputs}, {inputs}] of {weight.dtype} cannot be packed")
        super().__init__(library, (outputs, inputs), bias, activation, _BFLOAT16)
        columns = _COLUMNS // 2 if self._gated else _COLUMNS
        packed = library.memory.allocate(-(-self._width // columns) * _COLUMNS * inputs, dtype=torch.bfloat16)
        step = _COLUMNS * max(1, _PART_NUMBERS // (_COLUMNS * inputs)) if is_wide else outputs
        for start in range(0, outputs, step):
            part = weight[start : start + step].to(torch.bfloat16).contiguous()
            packing = PackingArguments(
                part.data_ptr(), packed[start * inputs :].data_ptr(), len(part), inputs, self._gated
            )
            library.pack(byref(packing))
        self._template.weight = packed.data_ptr()
        self._kept.append(packed)

    def rows(self, indexes: torch.Tensor) -> torch.Tensor:
        """Return the rows of the weight, which has no gate, with these indexes: [count, inputs]."""
        indexes = indexes.long().contiguous()
        _require(not self._gated and indexes.ndim == 1)
        if len(indexes) and not 0 <= int(indexes.min()) <= int(indexes.max()) < self._outputs:
            raise IndexError(f"an index is not in [0, {self._outputs})")
        out = torch.empty(len(indexes), self._inputs, dtype=torch.bfloat16)
        arguments = LookupArguments(
            self._template.weight, indexes.data_ptr(), out.data_ptr(), len(indexes), self._inputs
        )
        self._library.lookup(byref(arguments))
        return out


class PackedLinearInt8(Product):
    """A product of 8-bit integers. x is quantized in each call, with a scale for each row and group of inputs.

    Args:
        weight: int8 [outputs, inputs], from -127 to 127.
        scales: [outputs] or [outputs, groups], in bfloat16 or a wider type. Inputs are in consecutive groups of equal
            size, a multiple of UNIT.
    """

    def __init__(
        self,
        library: Library,
        weight: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: Activation | None = None,
    ) -> None:
        outputs, inputs = weight.shape
        scales = scales.reshape(outputs, -1)
        groups = scales.shape[1]
        is_whole = inputs % groups == 0 and inputs // groups % UNIT == 0 and inputs // groups <= MAX_GROUP
        if weight.dtype != torch.int8 or not is_whole or (activation in _GATES and outputs % 2):
            raise ValueError(f"a weight [{outputs}, {inputs}] of {weight.dtype} in {groups} groups cannot be packed")
        super().__init__(library, (outputs, inputs), bias, activation, _INT8, inputs // groups)
        self._store("weight", weight, _pack_int8)
        self._store_scales(scales)

    @classmethod
    def from_float(
        cls,
        library: Library,
        weight: torch.Tensor,
        quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ) -> PackedLinearInt8:
        """Return the product of a weight [outputs, inputs] that is quantized in parts.

        Args:
            quantize: returns rows in 8 bits and their scales, [rows, groups].
        """
        outputs, inputs = weight.shape
        groups = quantize(weight[:1])[1].shape[1]
        product = cls.__new__(cls)
        Product.__init__(product, library, (outputs, inputs), None, None, _INT8, inputs // groups)
        scales: list[torch.Tensor] = []

        def convert(tiles: torch.Tensor) -> torch.Tensor:
            codes, part = quantize(tiles.flatten(0, 1))
            scales.append(part)
            return _pack_int8(codes.view(tiles.shape))

        product._store("weight", weight, convert)
        product._store_scales(torch.cat(scales)[:outputs])
        return product

    def _store_scales(self, scales: torch.Tensor) -> None:
        is_short = scales.dtype == torch.bfloat16
        self._store("short_scales" if is_short else "scales", scales if is_short else scales.float(), _transpose)


class PackedLinearInt4(Product):
    """A product with 4-bit weights: (number - zero) · scale, with a zero and a scale for each output and group.

    Args:
        packed: uint8 [outputs, inputs / 2], numbers from 0 to 15. The lower 4 bits are the even input.
        scales: [outputs, groups]. Inputs are in consecutive groups of `group_size`, a multiple of UNIT.
        zeros: [outputs, groups], or None if all are 8.
    """

    def __init__(
        self,
        library: Library,
        packed: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        group_size: int,
        bias: torch.Tensor | None = None,
        activation: Activation | None = None,
    ) -> None:
        outputs, inputs = packed.shape[0], 2 * packed.shape[1]
        is_whole = group_size % UNIT == 0 and scales.shape == (outputs, inputs / group_size)
        if packed.dtype != torch.uint8 or not is_whole or (activation in _GATES and outputs % 2):
            raise ValueError(f"a packed weight {list(packed.shape)} of {packed.dtype} cannot be used")
        if zeros is not None and zeros.shape != scales.shape:
            raise ValueError(f"want zeros of the shape {list(scales.shape)}, got {list(zeros.shape)}")
        super().__init__(library, (outputs, inputs), bias, activation, _INT4, group_size)
        self._store("weight", packed, _pack_int4)
        self._store("scales", scales.float(), _transpose)
        if zeros is not None:
            self._store("offsets", zeros.float() - 8, _transpose)


class RescoredLogits:
    """Logits x @ weightᵀ, approximated in 8-bit integers. Those of likely tokens are computed again with the weight.

    The likely tokens of a row are those whose approximate logit is at most 1.5 standard deviations of the row's logits
    below the maximum.

    Args:
        weight: [tokens, width]. It is kept in bfloat16.
        approximate: the product of the weight in 8 bits.
    """

    def __init__(self, library: Library, weight: torch.Tensor, approximate: PackedLinearInt8) -> None:
        tokens, width = weight.shape
        _require((approximate.template.outputs, approximate.template.inputs) == (tokens, width))
        self._library = library
        self._approximate = approximate
        self.weight = library.memory.allocate(tokens, width, dtype=torch.bfloat16).copy_(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits, float32 [rows, tokens], for x [rows, width]."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        logits = self._approximate.in_float32(x)
        arguments = RescoringArguments(
            x.data_ptr(), self.weight.data_ptr(), logits.data_ptr(), len(x), x.shape[1], logits.shape[1], x.stride(0)
        )
        self._library.rescore(byref(arguments))
        return logits


class LayerOperator:
    """A layer of a decoder: attention and a gated feed-forward block, each with a residual addition.

    Args:
        norms: the weights, float32, of the norms before and after attention, before and after the block, of queries and
            of keys; None: the layer does not have this norm. A query's norm is of each head or of all together.
        products: of query, key and value; of attention's result; of gate and up; of the block's result.
    """

    def __init__(
        self,
        library: Library,
        norms: Sequence[torch.Tensor | None],
        eps: float,
        products: tuple[Product, Product, Product, Product],
    ) -> None:
        qkv, projection, gated, down = products
        self.library, self._kept = library, (norms, products)
        self._norms = [
            None if weight is None else NormArguments(weight=weight.data_ptr(), width=len(weight), eps=eps)
            for weight in norms
        ]
        self.template = LayerArguments(
            qkv=addressof(qkv.template), projection=addressof(projection.template), gated=addressof(gated.template),
            down=addressof(down.template),
        )  # fmt: skip
        names = "before_attention", "after_attention", "before_mlp", "after_mlp", "query_norm", "key_norm"
        for name, norm in zip(names, self._norms, strict=True):
            setattr(self.template, name, None if norm is None else addressof(norm))
        outputs, codes, scales = zip(*(product.row_sizes for product in products), strict=True)
        self.width, self.attended, self.qkv_width = qkv.template.inputs, projection.template.inputs, outputs[0]
        _, after_attention, _, after_mlp, *_ = norms
        unnormalized = [0 if norm is None else 4 * self.width for norm in (after_attention, after_mlp)]  # in float32
        narrow = max(2 * self.width, 2 * self.attended, unnormalized[1])
        wide = max(2 * outputs[0], 2 * outputs[2], unnormalized[0])
        # Bytes for each row in the memory of a call: narrow, wide, middle, codes and scales of rows.
        self.row_bytes = (narrow, wide, 4 * self.width, max(codes), 4 * max(scales))
        _require((gated.template.inputs, down.template.inputs) == (self.width, outputs[2]))
        _require(outputs[1] == outputs[3] == self.width)
        _require(all(weight is None or len(weight) == self.width for weight in norms[:4]))
        self.head_norms = [0 if weight is None else len(weight) for weight in norms[4:]]


class LayerStack:
    """Consecutive layers in one call. The output of each one is the input of the next.

    Args:
        first: the index in the model of the first one of `layers`.
    """

    def __init__(self, layers: Sequence[LayerOperator], first: int = 0) -> None:
        self._library, self._layers = layers[0].library, list(layers)
        self._span = slice(first, first + len(layers))
        self._templates = (LayerArguments * len(layers))(*(layer.template for layer in layers))
        sizes = (max(column) for column in zip(*(layer.row_bytes for layer in layers), strict=True))
        self._offsets = [0, *accumulate(-(-size // 64) * 64 for size in sizes)]
        self._width = layers[0].width
        _require(all(layer.width == self._width for layer in layers))
        self._caches: Sequence[LayerCache] = ()

    def __call__(self, x: torch.Tensor, rotations: Sequence[RotationStep], attention: StackAttention) -> torch.Tensor:
        """Return the last layer's output for x, float32 [tokens, width].

        Args:
            rotations: of each layer.
        """
        rows, count = len(x), len(self._layers)
        steps = attention.steps[self._span]
        _require(x.dtype == torch.float32 and x.is_contiguous() and x.shape[1] == self._width)
        _require(len(rotations) == len(steps) == count)
        _require(all(rows == rotation.arguments.rows for rotation in dict.fromkeys(rotations)))
        _require(all(rows == step.arguments.tokens for step in dict.fromkeys(steps)))
        if attention.caches is not self._caches:
            self._bind(attention)
        out = torch.empty_like(x)
        memory = torch.empty(rows * self._offsets[-1] + 64, dtype=torch.uint8)
        start = memory.data_ptr()
        start += -start % 64
        narrow, wide, middle, codes, scales, _ = (start + rows * offset for offset in self._offsets)
        rotation_list = (c_void_p * count)(*[addressof(rotation.arguments) for rotation in rotations])
        step_list = (c_void_p * count)(*[addressof(step.arguments) for step in steps])
        arguments = LayersArguments(
            addressof(self._templates), addressof(rotation_list), addressof(step_list), x.data_ptr(), out.data_ptr(),
            narrow, wide, middle, codes, scales, count, rows,
        )  # fmt: skip
        self._library.layers(byref(arguments))
        return out

    def _bind(self, attention: StackAttention) -> None:
        """Use the caches of `attention` in this call and the next ones."""
        caches, steps = attention.caches[self._span], attention.steps[self._span]
        for layer, template, cache, step in zip(self._layers, self._templates, caches, steps, strict=True):
            _require((step.query_width, step.total_width) == (layer.attended, layer.qkv_width))
            key_width = (step.total_width - step.query_width) // 2
            for size, total in zip(layer.head_norms, (step.query_width, key_width), strict=True):
                _require(size in (0, step.arguments.head_dim, total))
            template.cache, template.scale = cache.pages.data_ptr(), cache.scale
            template.window, template.soft_cap = cache.window, cache.soft_cap
        self._caches = attention.caches


def rms_norm(
    library: Library, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the root-mean-square normalization of x [..., width] with `weight`, float32 [width], plus `residual`.

    Args:
        x: in bfloat16 or float32.
        residual: in float32, as x and the result then are.
    """
    x = x.contiguous()
    is_wide, width = x.dtype == torch.float32, len(weight)
    _require(x.dtype in (torch.bfloat16, torch.float32) and weight.dtype == torch.float32 and x.shape[-1] == width)
    arguments = NormArguments(weight=weight.data_ptr(), rows=x.numel() // width, width=width, eps=eps)
    setattr(arguments, "wide_x" if is_wide else "x", x.data_ptr())
    if residual is None:
        out = torch.empty_like(x, dtype=torch.bfloat16)
        arguments.out = out.data_ptr()
    else:
        _require(is_wide and residual.shape == x.shape and residual.dtype == x.dtype and residual.is_contiguous())
        out = torch.empty_like(x)
        arguments.residual, arguments.wide_out = residual.data_ptr(), out.data_ptr()
    library.norm(byref(arguments))
    return out


def layer_norm(library: Library, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the layer normalization of x [..., width] with `weight` and `bias`, float32 [width]."""
    x = x.contiguous()
    _require(x.dtype == torch.bfloat16 and weight.dtype == bias.dtype == torch.float32)
    width = x.shape[-1]
    _require(weight.shape == bias.shape == (width,))
    out = torch.empty_like(x)
    arguments = LayerNormArguments(
        x.data_ptr(), weight.data_ptr(), bias.data_ptr(), out.data_ptr(), x.numel() // width, width, eps
    )
    library.layer_norm(byref(arguments))
    return out


class SelfAttention:
    """Attention within the inputs of a batch, whose tokens are concatenated. Nothing is cached.

    Args:
        lengths: number of tokens of each input.
    """

    def __init__(self, library: Library, lengths: Sequence[int]) -> None:
        self._library = library
        self._parts = [-(-length // _PART_QUERIES) for length in lengths]
        self._starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)

    @staticmethod
    def supports(head_dim: int) -> bool:
        return head_dim % UNIT == 0 and head_dim <= MAX_HEAD_DIM

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        before: int | None = None,
        after: int | None = None,
    ) -> torch.Tensor:
        """Return the attention [tokens, heads · head_dim].

        Args:
            query: [tokens, heads, head_dim]. As key and value, it may be a view with a larger stride of tokens.
            key, value: [tokens, kv_heads, head_dim], with equal strides.
            before, after: tokens before and after itself that a token attends to, at most; None: all.
        """
        tokens, heads, head_dim = query.shape
        kv_heads = key.shape[1]
        _require(tokens == int(self._starts[-1]) and key.shape == value.shape == (tokens, kv_heads, head_dim))
        _require(self.supports(head_dim) and heads % kv_heads == 0)
        if key.stride() != value.stride():
            key, value = key.contiguous(), value.contiguous()
        for x in (query, key, value):
            _require(x.dtype == torch.bfloat16 and x.stride()[1:] == (head_dim, 1))
        out = query.new_empty(tokens, heads * head_dim)
        parts = torch.tensor([0, *accumulate(count * heads for count in self._parts)], dtype=torch.int32)
        arguments = SelfAttentionArguments(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), self._starts.data_ptr(),
            parts.data_ptr(), len(self._parts), heads, kv_heads, head_dim, query.stride(0), key.stride(0),
            tokens if before is None else before, tokens if after is None else after, scale,
        )  # fmt: skip
        self._library.self_attention(byref(arguments))
        return out


def argmax(library: Library, x: torch.Tensor) -> torch.Tensor:
    """Return the index of each row's first maximum, int64 [rows], for x, float32 [rows, width]. NaN is the maximum."""
    x = x.contiguous()
    _require(x.dtype == torch.float32 and x.ndim == 2 and x.shape[1] > 0)
    out = torch.empty(len(x), dtype=torch.int64)
    library.argmax(byref(MaximaArguments(x.data_ptr(), out.data_ptr(), *x.shape)))
    return out


class RotationStep:
    """The rotation of a step's tokens, by halves of the first 2 · n numbers of each head.

    Args:
        cos, sin: float32 [tokens, n].
    """

    def __init__(self, library: Library, cos: torch.Tensor, sin: torch.Tensor, heads: int, head_dim: int) -> None:
        rows, half = cos.shape
        for factors in (cos, sin):
            _require(factors.dtype == torch.float32 and factors.is_contiguous() and factors.shape == (rows, half))
        _require(2 * half <= head_dim)
        self._library, self._kept = library, (cos, sin)
        self.arguments = RotationArguments(
            cos=cos.data_ptr(), sin=sin.data_ptr(), rows=rows, heads=heads, head_dim=head_dim, rotated=2 * half
        )

    def apply(self, x: torch.Tensor) -> None:
        """Rotate x [tokens, heads, head_dim] in place. Its heads are contiguous."""
        arguments = RotationArguments.from_buffer_copy(self.arguments)
        _require(x.dtype == torch.bfloat16 and x.shape == (arguments.rows, arguments.heads, arguments.head_dim))
        _require(x.stride()[1:] == (arguments.head_dim, 1))
        arguments.x, arguments.stride = x.data_ptr(), x.stride(0)
        self._library.rotation(byref(arguments))


def rotate(library: Library, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate x [rows, heads, head_dim] in place, as `RotationStep` does."""
    RotationStep(library, cos, sin, x.shape[1], x.shape[2]).apply(x)


def int8_block_bytes(kv_heads: int, head_dim: int, block_size: int) -> int:
    """Return the bytes of a block of one layer in an 8-bit cache: codes, and a scale in bfloat16 for each token and
    UNIT numbers of a head."""
    return 2 * kv_heads * block_size * (head_dim + 2 * (head_dim // UNIT))


class AttentionStep:
    """The data of a step's attention that all layers share.

    Args:
        query_start_loc: integers [sequences + 1], the first token of each sequence.
        seq_lens: integers [sequences], tokens of each sequence, including the new ones.
        block_table: integers [sequences, max_blocks].
        slot_mapping: integers [tokens].
        cache_dtype: bfloat16, or int8 for a cache with scales.
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
        cache_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        query_start_loc, seq_lens, block_table, slot_mapping = sizes = [
            x if x.dtype == torch.int32 and x.is_contiguous() else x.to(torch.int32).contiguous()
            for x in (query_start_loc, seq_lens, block_table, slot_mapping)
        ]
        _require(heads % kv_heads == 0 and head_dim <= MAX_HEAD_DIM and head_dim % UNIT == block_size % UNIT == 0)
        self._library = library
        starts = query_start_loc.numpy()  # an operation of NumPy takes a fraction of PyTorch's time
        parts = np.zeros_like(starts)
        np.cumsum(-(np.diff(starts) * (heads // kv_heads) // -_PART_ROWS) * kv_heads, out=parts[1:])
        self._kept = (*sizes, parts)
        self._shape = (heads, kv_heads, head_dim)
        self.query_width, self.total_width = heads * head_dim, (heads + 2 * kv_heads) * head_dim
        self.arguments = AttentionArguments(
            slots=slot_mapping.data_ptr(),
            table=block_table.data_ptr(),
            starts=query_start_loc.data_ptr(),
            lengths=seq_lens.data_ptr(),
            parts=parts.ctypes.data,
            sequences=len(seq_lens),
            tokens=len(slot_mapping),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            table_stride=block_table.stride(0),
            cache_format=_INT8 if cache_dtype == torch.int8 else _BFLOAT16,
        )
        self._cache_dtype = cache_dtype

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
            cache: [blocks, 2 · kv_heads · block_size · head_dim], finite numbers; in 8 bits, the bytes of
                `int8_block_bytes` for each block.
            window: tokens that a token attends to, including itself; 0: all.
            soft_cap: scores are limited to ±soft_cap with tanh; 0: no limit.
        """
        heads, kv_heads, head_dim = self._shape
        tokens = self.arguments.tokens
        _require(query.shape == (tokens, heads, head_dim) and key.shape == value.shape == (tokens, kv_heads, head_dim))
        if key.stride() != value.stride():
            key, value = key.contiguous(), value.contiguous()
        for x in (query, key, value):
            _require(x.dtype == torch.bfloat16 and (x.stride()[1:] == (head_dim, 1)))
        _require(cache.is_contiguous() and cache.dtype == self._cache_dtype)
        out = query.new_empty(tokens, heads * head_dim)
        arguments = self.arguments
        arguments.query, arguments.key, arguments.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        arguments.out, arguments.cache = out.data_ptr(), cache.data_ptr()
        arguments.query_stride, arguments.kv_stride = query.stride(0), key.stride(0)
        arguments.scale, arguments.window, arguments.soft_cap = scale, window, soft_cap
        self._library.attention(byref(arguments))
        return out


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The attention of one layer, as the arguments of `AttentionStep.attend`."""

    pages: torch.Tensor
    scale: float
    window: int = 0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class StackAttention:
    """The attention of a model's layers in one step.

    Args:
        caches: of each layer; the same sequence in all steps. Its steps have the same heads.
        steps: of each layer.
    """

    caches: Sequence[LayerCache]
    steps: Sequence[AttentionStep]


def _transpose(tiles: torch.Tensor) -> torch.Tensor:
    return tiles.transpose(1, 2)


def _pack_int8(tiles: torch.Tensor) -> torch.Tensor:
    unsigned = tiles.view(torch.uint8) ^ 128  # 128 larger
    return unsigned.view(len(tiles), _COLUMNS, -1, 4).transpose(1, 2)


def _pack_int4(tiles: torch.Tensor) -> torch.Tensor:
    """Pack tiles in which a byte is a pair of inputs. 4 pairs are a lane of two words of 16 bits."""
    pairs = tiles.view(len(tiles), _COLUMNS, -1, 4).transpose(1, 2).int()  # [tiles, inputs / 8, columns, pair]
    shifts = torch.arange(0, 16, 4, dtype=torch.int32)
    words = ((pairs & 15) << shifts).sum(-1), ((pairs >> 4) << shifts).sum(-1)
    return torch.stack(words, -1).to(torch.uint16)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError("want tensors of the documented shapes, types and strides")
