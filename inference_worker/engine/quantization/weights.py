"""Quantized weights as linear layers keep them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from inference_worker.checkpoints.model_config import ModelError
from inference_worker.engine.tensors import rows_per_call

# Numbers of a part on the CPU. Some ten copies of it in wider types exist at a time, and the heap keeps their pages.
_PART_NUMBERS = 1 << 17


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight of 8-bit integers with a scale for each output and group of inputs.

    The inputs of its products are quantized, too, with a scale for each row and group.

    values: int8 [outputs, inputs], from -127 to 127.
    scales: float32 or bfloat16 [outputs, groups]. Groups are consecutive and of equal size.
    dtype: of the dequantized weight.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    @property
    def group_size(self) -> int:
        """Return the inputs that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    def dequantize(self) -> torch.Tensor:
        """Return the weight in its dtype."""
        parts = []
        for values, scales in split_rows(self.shape[1], self.values, self.scales):
            groups = values.float().view(*scales.shape, -1)
            parts.append((groups * scales.float()[..., None]).view(values.shape).to(self.dtype))
        return _join(parts)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight of 4-bit integers with a scale and a zero point for each group of inputs: (value - zero) · scale.

    packed: uint8 [outputs, inputs / 2]. The lower 4 bits are the input with the even index.
    scales, zeros: float32 [outputs, inputs / group_size].
    dtype: of the dequantized weight.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group_size: int
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        outputs, half = self.packed.shape
        return torch.Size((outputs, 2 * half))

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes + self.zeros.nbytes

    def dequantize(self) -> torch.Tensor:
        """Return the weight in its dtype."""
        parts = []
        for packed, scales, zeros in split_rows(self.shape[1], self.packed, self.scales, self.zeros):
            values = torch.stack((packed & 15, packed >> 4), dim=-1).view(*scales.shape, self.group_size)
            parts.append(((values - zeros[..., None]) * scales[..., None]).flatten(1).to(self.dtype))
        return _join(parts)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight of 8-bit floating-point numbers with a scale for each output. The inputs of its products are
    quantized, too.

    values: float8_e4m3fn [outputs, inputs].
    scales: float32 [outputs].
    dtype: of the dequantized weight.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dequantize(self) -> torch.Tensor:
        """Return the weight in its dtype."""
        rows = split_rows(self.shape[1], self.values, self.scales)
        return _join([(values.float() * scales[:, None]).to(self.dtype) for values, scales in rows])


QuantizedWeight = Int8Weight | Int4Weight | Fp8Weight
Weight = torch.Tensor | QuantizedWeight


def split_rows(width: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield parts of the tensors' rows, so that a conversion of a part takes little memory.

    Args:
        width: numbers in a row of the converted weight.
    """
    device = tensors[0].device
    step = rows_per_call(width, device) if device.type == "cuda" else max(1, _PART_NUMBERS // width)
    return zip(*(torch.split(tensor, step) for tensor in tensors), strict=True)


def concatenate(parts: Sequence[Weight]) -> Weight:
    """Return the weights, which have the same inputs, as one. If their kinds differ, they are dequantized."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Int8Weight):
        int8 = [part for part in parts if isinstance(part, Int8Weight)]
        if len(int8) == len(parts):
            return Int8Weight(_join([p.values for p in int8]), _join([p.scales for p in int8]), first.dtype)
    if isinstance(first, Fp8Weight):
        fp8 = [part for part in parts if isinstance(part, Fp8Weight)]
        if len(fp8) == len(parts):
            values = _join([p.values.view(torch.uint8) for p in fp8]).view(first.values.dtype)
            return Fp8Weight(values, _join([p.scales for p in fp8]), first.dtype)
    if isinstance(first, Int4Weight):
        int4 = [part for part in parts if isinstance(part, Int4Weight) and part.group_size == first.group_size]
        if len(int4) == len(parts):
            packed, scales, zeros = (_join([getattr(p, name) for p in int4]) for name in ("packed", "scales", "zeros"))
            return Int4Weight(packed, scales, zeros, first.group_size, first.dtype)
    return torch.cat([dequantize(part) for part in parts])


def select_outputs(weight: Weight, outputs: torch.Tensor) -> Weight:
    """Return the weight with these outputs, integer [n], in their order."""
    if isinstance(weight, torch.Tensor):
        return weight[outputs.to(weight.device)]
    if isinstance(weight, Int4Weight):
        rows = outputs.to(weight.packed.device)
        parts = weight.packed[rows], weight.scales[rows], weight.zeros[rows]
        return Int4Weight(*parts, weight.group_size, weight.dtype)
    rows = outputs.to(weight.values.device)
    return type(weight)(weight.values[rows], weight.scales[rows], weight.dtype)


def dequantize(weight: Weight) -> torch.Tensor:
    """Return the weight as a floating-point tensor."""
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize()


def require_multiples(name: str, shape: tuple[int, int], outputs: int, inputs: int) -> None:
    """Check that the sizes of a packed weight [outputs, inputs] are multiples of these numbers.

    Raises:
        ModelError: a size is not.
    """
    for noun, size, unit in (("outputs", shape[0], outputs), ("inputs", shape[1], inputs)):
        if size % unit:
            raise ModelError(f"layer {name} has {size} {noun}; its packed weight requires a multiple of {unit}")


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """Return numbers from 0 to 15, [outputs, inputs], packed as in `Int4Weight`."""
    values = values.to(torch.uint8)
    return values[:, ::2] | (values[:, 1::2] << 4)


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the unsigned numbers of `bits` bits in int32 [rows, n], as uint8 [rows, n · 32 / bits].

    The lowest bits are the first number.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    parts = split_rows(words.shape[1] * len(shifts), words)
    return _join([((part[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2) for (part,) in parts])


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts))
