"""The layers of the models, each in the implementation that is fastest on its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch.nn import functional

from inference_worker.checkpoints.model_config import ModelConfig, RopeConfig
from inference_worker.engine.architectures.rope import Rope
from inference_worker.engine.compute_path import is_fast_in_pytorch
from inference_worker.engine.quantization.quantize import quantize_head, scales_of, to_int8
from inference_worker.engine.quantization.weights import Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight, Weight
from kernels import invariant
from kernels.native import operators
from kernels.native.library import Library


class Linear:
    """x @ weightᵀ + bias. On the CPU the weight is converted once to the layout that oneDNN prefers on the machine.

    oneDNN can also fuse an addition that follows the product. On a CPU without fast products in a 16-bit type, the
    weight is converted to float32, and the product is computed in it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, pack: bool | None = None) -> None:
        packs = weight.device.type == "cpu" and torch._C._has_mkldnn if pack is None else pack
        if weight.device.type == "cpu" and not is_fast_in_pytorch(weight.dtype):
            weight, bias = weight.float(), None if bias is None else bias.float()
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1) if packs else None
        self.weight = None if packs else weight
        self._dtype = weight.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x.to(self._dtype)).to(x.dtype)

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the product plus `other`, in the dtype of `other`."""
        if x.dtype != self._dtype or other.dtype != self._dtype:
            return (self._multiply(x.to(self._dtype)) + other).to(other.dtype)
        if self.packed is None:
            return functional.linear(x, self._plain, self.bias) + other
        return _tensor(torch.ops.mkldnn._linear_pointwise.binary(x, other, self.packed, self.bias, "add"))

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return functional.linear(x, self._plain, self.bias)
        return _tensor(torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], ""))

    @property
    def _plain(self) -> torch.Tensor:
        if self.weight is None:
            raise RuntimeError("the weight is packed")
        return self.weight


def _tensor(value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError("want a tensor")
    return value


class RMSNorm:
    """Root-mean-square normalization with a weight. The result has the weight's dtype.

    Args:
        offset: added to the weight. With an offset, and on the CPU, the computation is in float32.
    """

    def __init__(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        is_wide = offset != 0 or weight.device.type == "cpu"
        self.weight = weight.float() + offset if is_wide else weight
        self.eps, self._dtype = eps, weight.dtype

    def divide(self, factors: torch.Tensor) -> None:
        """Divide each channel of the output by its factor, a power of two."""
        self.weight = self.weight / factors.to(self.weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._normalize(x).to(self._dtype)

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the normalization of x plus `other`, in the dtype of `other`."""
        return (self._normalize(x) + other).to(other.dtype)

    def _normalize(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class InvariantLinear(Linear):
    """A linear layer whose rows do not depend on the number of rows.

    Raises:
        RuntimeError: the machine's matrix product does not allow this.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, pack: bool | None = None) -> None:
        super().__init__(weight, bias, pack=pack)
        invariant.require_equal_rows(super().__call__, weight[0])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return invariant.in_tiles(super().__call__, x)

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return invariant.in_tiles(super().add, x, other)


class InvariantRMSNorm(RMSNorm):
    """Root-mean-square normalization whose rows do not depend on the number of rows."""

    def _normalize(self, x: torch.Tensor) -> torch.Tensor:
        return invariant.in_tiles(super()._normalize, x)


class NativeLinear(Linear):
    """A linear layer on the C kernels. Its rows do not depend on the number of rows.

    Only the packed copy of the weight is kept.
    """

    def __init__(self, product: operators.Product) -> None:
        self.product = product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.product(x, other)


class NativeHead(NativeLinear):
    """A linear layer on the C kernels whose output is in float32.

    In bfloat16 the two best tokens often have equal logits, and then the first one is the result.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product.in_float32(x)


class NativeRescoredHead(Linear):
    """A head on the C kernels in 8-bit integers, whose likely tokens are computed again in bfloat16.

    Its rows do not depend on the number of rows. Only the likely tokens' rows of the weight are read.
    """

    def __init__(self, logits: operators.RescoredLogits) -> None:
        self.logits = logits

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(x)


class NativeRMSNorm(RMSNorm):
    """Root-mean-square normalization on the C kernels. Its rows do not depend on the number of rows."""

    def __init__(self, library: Library, weight: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        super().__init__(weight.float(), eps, offset)
        self._library = library

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return operators.rms_norm(self._library, x, self.weight, self.eps)

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return operators.rms_norm(self._library, x.to(other.dtype), self.weight, self.eps, other)


class LayerNorm:
    """Layer normalization with a weight, and a bias or none."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class NativeLayerNorm(LayerNorm):
    """Layer normalization on the C kernels."""

    def __init__(self, library: Library, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        super().__init__(weight.float(), None, eps)
        self._bias = torch.zeros_like(self.weight) if bias is None else bias.float()
        self._library = library

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return operators.layer_norm(self._library, x, self.weight, self._bias, self.eps)


class Int8Linear(Linear):
    """x @ weightᵀ + bias in 8-bit integers. Each row and group of x gets a scale.

    Rows do not depend on the number of rows.
    """

    def __init__(self, weight: Int8Weight, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        groups = weight.scales.shape[1]
        self._values = [part.T for part in weight.values.chunk(groups, 1)]  # numbers of each group, [inputs, outputs]
        self._scales = weight.scales.T.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values, row_scales = to_int8(x, len(self._values))
        out = torch.zeros(len(x), self._scales.shape[1], device=x.device)
        for part, row_scale, weight, scale in zip(
            values.chunk(len(self._values), 1), torch.split(row_scales, 1, 1), self._values, self._scales, strict=True
        ):
            out += self._multiply_integers(part, weight).float().mul_(row_scale).mul_(scale)
        return (out if self.bias is None else out.add_(self.bias)).to(x.dtype)

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(x) + other

    def _multiply_integers(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = len(values)
        if values.is_cuda and rows < _MIN_CUDA_ROWS:
            values = functional.pad(values, (0, 0, 0, _MIN_CUDA_ROWS - rows))
        return torch._int_mm(values.contiguous(), weight)[:rows]


class Fp8Linear(Linear):
    """x @ weightᵀ + bias in 8-bit floating-point numbers. Each row of x gets a scale."""

    def __init__(self, weight: Fp8Weight, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self._values = weight.values.T  # [inputs, outputs]
        self._scales = weight.scales[None]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scales = scales_of(x, 448.0)
        values = (x.float() / scales).to(self._values.dtype)
        out = torch._scaled_mm(values, self._values, scale_a=scales, scale_b=self._scales, out_dtype=x.dtype)
        return out if self.bias is None else out.add_(self.bias)

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(x) + other


_MIN_CUDA_ROWS = 32  # rows of a product of 8-bit integers
_MIN_FP8_CAPABILITY = (8, 9)  # compute capability of a CUDA device


class Layers:
    """The factory of one model's layers, either all standard or all batch-invariant.

    Args:
        kernels: the C kernels. Products of a shape that they do not support use PyTorch.
    """

    def __init__(self, *, batch_invariant: bool = False, kernels: Library | None = None) -> None:
        self._invariant = batch_invariant
        self._kernels = kernels
        self.quantized = self.dequantized = 0  # layers whose quantized weight is kept, or converted
        self.unsupported = 0  # products that PyTorch computes because the C kernels do not support their sizes
        self._parameters = self._bytes = 0  # parameters and bytes of all weights

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        """Return the layer of the weight. A quantized weight without a product for its kind is dequantized."""
        product = self._native_product(weight, bias)
        if product is not None:
            return NativeLinear(product)
        if not isinstance(weight, torch.Tensor) and self._multiplies(weight):
            self._keep(weight)
            return Int8Linear(weight, bias) if isinstance(weight, Int8Weight) else Fp8Linear(weight, bias)
        plain = self._to_tensor(weight)
        return InvariantLinear(plain, bias) if self._invariant else Linear(plain, bias)

    def head(self, weight: torch.Tensor, *, rescores: bool = False) -> Linear:
        """Return the layer that computes logits: on the C kernels in float32, else in the dtype.

        Args:
            weight: on the C kernels, it may be in a wider type. It is large, so it is converted in parts.
            rescores: on the C kernels, compute in 8-bit integers, and only the likely tokens in the dtype.
        """
        if self._kernels is None:
            return self.linear(weight)
        if weight.shape[1] % operators.UNIT:
            return self.linear(weight.to(torch.bfloat16))
        size, itemsize = weight.shape.numel(), torch.bfloat16.itemsize
        if not rescores:
            self._count(size, size * itemsize)
            return NativeHead(operators.PackedLinear(self._kernels, weight))
        approximate = operators.PackedLinearInt8.from_float(self._kernels, weight, _quantize_rows)
        self.quantized += 1
        self._count(size, size + size // approximate.template.group * itemsize)
        return NativeRescoredHead(operators.RescoredLogits(self._kernels, weight, approximate))

    def embedding(
        self, weight: torch.Tensor, head: Linear | None, *, is_mapped: bool
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the lookup of the rows of `weight`. It reads the weight of a tied head, not a second copy.

        Args:
            weight: on the C kernels, it may be in a wider type.
            is_mapped: the weight is a part of a mapped file. It is copied, since it would keep the whole file mapped.
        """
        if isinstance(head, NativeRescoredHead):
            return partial(_look_up, head.logits.weight)
        if isinstance(head, NativeLinear) and isinstance(head.product, operators.PackedLinear):
            return head.product.rows
        dtype = weight.dtype if self._kernels is None else torch.bfloat16
        return partial(_look_up, weight.to(dtype, copy=is_mapped))

    def norm(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> RMSNorm:
        if self._kernels is not None:
            return NativeRMSNorm(self._kernels, weight, eps, offset)
        return (InvariantRMSNorm if self._invariant else RMSNorm)(weight, eps, offset)

    def layer_norm(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> LayerNorm:
        if self._kernels is not None:
            return NativeLayerNorm(self._kernels, weight, bias, eps)
        return LayerNorm(weight, bias, eps)

    def gated_linear(
        self, weight: Weight, bias: torch.Tensor | None = None, activation: str = "silu"
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a layer that computes activation(gate) · up for the rows of gate before those of up in `weight`."""
        native = self._native_product(weight, bias, "silu" if activation == "silu" else "gelu_tanh")
        if native is not None:
            return native
        product, gate = self.linear(weight, bias), self.gate(activation)
        return lambda x: gate(product(x))

    def fuse(
        self, norms: Sequence[RMSNorm | None], products: Sequence[Callable[[torch.Tensor], torch.Tensor]]
    ) -> operators.LayerOperator | None:
        """Return the layer of these parts in one call of the C kernels, or None if they do not compute all of them.

        Args:
            norms: before and after attention, before and after the feed-forward block, of queries, and of keys.
            products: of query, key and value; of attention's result; of gate and up; of the block's result.
        """
        found = [part.product if isinstance(part, NativeLinear) else part for part in products]
        native = [part for part in found if isinstance(part, operators.Product)]
        eps = {norm.eps for norm in norms if norm is not None}
        if self._kernels is None or len(native) != 4 or len(eps) != 1:
            return None
        qkv, projection, gated, down = native
        weights = [None if norm is None else norm.weight for norm in norms]
        return operators.LayerOperator(self._kernels, weights, eps.pop(), (qkv, projection, gated, down))

    def gelu_linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a layer that computes gelu(x @ weightᵀ + bias)."""
        native = self._native_product(weight, bias, "gelu")
        if native is not None:
            return native
        product = self.linear(weight, bias)
        return lambda x: functional.gelu(product(x))

    def rope(self, rope: RopeConfig, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Rope:
        rotated, plain = config.num_heads + config.num_kv_heads, config.num_kv_heads
        return Rope(
            rope, config.head_dim, config.max_model_len, rotated, plain, dtype, device,
            batch_invariant=self._invariant, kernels=self._kernels,
        )  # fmt: skip

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) · up, [num_tokens, width], for [num_tokens, 2 × width] with gate before up."""
        if self._invariant:
            return invariant.silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return gelu(gate) · up with the tanh approximation, shaped as in `silu_mul`."""
        if self._invariant:
            return invariant.gelu_tanh_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh").mul_(up)

    def gate(self, activation: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the gate of a feed-forward block by the name in the configuration."""
        return {"silu": self.silu_mul, "gelu_pytorch_tanh": self.gelu_tanh_mul}[activation]

    def softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of logits [rows, width], in float32."""
        if self._invariant:
            return invariant.in_tiles(_softmax, logits)
        return _softmax(logits)

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return invariant.apply_elementwise(torch.sigmoid_, x) if self._invariant else torch.sigmoid(x)

    def limit_softly(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """Return cap · tanh(x / cap)."""
        return invariant.limit_softly(x, cap) if self._invariant else torch.tanh(x / cap).mul_(cap)

    def _native_product(
        self, weight: Weight, bias: torch.Tensor | None, activation: operators.Activation | None = None
    ) -> operators.Product | None:
        """Return the product on the C kernels, or None if they do not support it."""
        if self._kernels is None:
            return None
        unit = operators.UNIT
        if isinstance(weight, Int8Weight) and weight.group_size % unit == 0:
            self._keep(weight)
            return operators.PackedLinearInt8(self._kernels, weight.values, weight.scales, bias, activation)
        if isinstance(weight, Int4Weight) and weight.group_size % unit == 0:
            self._keep(weight)
            return operators.PackedLinearInt4(
                self._kernels, weight.packed, weight.scales, weight.zeros, weight.group_size, bias, activation
            )
        if isinstance(weight, Int8Weight) or weight.shape[1] % unit:
            self.unsupported += 1
            return None
        return operators.PackedLinear(self._kernels, self._to_tensor(weight), bias, activation)

    def _keep(self, weight: QuantizedWeight) -> None:
        self.quantized += 1
        self._count(weight.shape.numel(), weight.nbytes)

    def _to_tensor(self, weight: Weight) -> torch.Tensor:
        if not isinstance(weight, torch.Tensor):
            self.dequantized += 1
            weight = weight.dequantize()
        self._count(weight.shape.numel(), weight.nbytes)
        return weight

    def _count(self, parameters: int, num_bytes: int) -> None:
        self._parameters += parameters
        self._bytes += num_bytes

    @property
    def bytes_per_parameter(self) -> float:
        """Return the average bytes of a number in the weights that the layers keep."""
        return self._bytes / max(self._parameters, 1)

    def _multiplies(self, weight: QuantizedWeight) -> TypeGuard[Int8Weight | Fp8Weight]:
        """Return whether PyTorch multiplies by the weight without converting it."""
        if isinstance(weight, Int8Weight):
            return weight.values.is_cuda  # on the CPU a plain product is at least 16 times faster
        if not isinstance(weight, Fp8Weight) or self._invariant or not weight.values.is_cuda:
            return False
        return torch.cuda.get_device_capability(weight.values.device) >= _MIN_FP8_CAPABILITY

    @property
    def kernels(self) -> Library | None:
        return self._kernels

    @property
    def is_invariant(self) -> bool:
        return self._invariant


def _quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of a head in 8 bits, and their scales. They are those of the rows in bfloat16."""
    codes = quantize_head(weight.to(torch.bfloat16))
    return codes.values, codes.scales


def _look_up(weight: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return functional.embedding(token_ids, weight)


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().softmax(-1)
