"""The weights of linear layers in a checkpoint, quantized or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from inference_worker.checkpoints.model_config import CheckpointFormat, ModelError
from inference_worker.contract.engine_config import QuantizationName
from inference_worker.engine.loading.loader import Progress, Weights
from inference_worker.engine.quantization import awq, compressed_tensors, fp8, gguf, gptq
from inference_worker.engine.quantization.quantize import quantize
from inference_worker.engine.quantization.weights import Weight, dequantize

Loader = Callable[[Weights, str, tuple[int, int], CheckpointFormat], Weight]
# By the format's name. A layer without one of the marks is not quantized.
_FORMATS: dict[str, tuple[Loader, tuple[str, ...]]] = {
    "awq": (awq.load, (awq.MARK,)),
    "gptq": (gptq.load, (gptq.MARK,)),
    "compressed-tensors": (compressed_tensors.load, (compressed_tensors.MARK,)),
    "fp8": (fp8.load, (fp8.MARK, "weight_scale")),
    "gguf": (gguf.load, gguf.MARKS),
}
_WEIGHT = ".weight"


class LinearWeights(Weights):
    """The tensors of a checkpoint, with the weights of its linear layers in their format.

    Args:
        form: the checkpoint's format; None if it is not quantized.
        quantization: quantizes the weights of the layers of a checkpoint that is not quantized.

    Raises:
        ModelError: a file is invalid, or the checkpoint is quantized and `quantization` is given, too.
    """

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device,
        form: CheckpointFormat | None = None,
        quantization: QuantizationName = "none",
        progress: Progress | None = None,
    ) -> None:
        if quantization == "gguf":
            if form is None or form.name != "gguf":
                raise ModelError(f"{directory}: is not converted from a .gguf file: set quantization to none")
            quantization = "none"
        if form is not None and quantization != "none":
            raise ModelError(f"{directory}: is already quantized ({form.name}): set quantization to none")
        super().__init__(directory, dtype, device, progress)
        self._form, self._quantization = form, quantization

    def take_unconverted(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        layer = name.removesuffix(_WEIGHT)
        if name.endswith(_WEIGHT) and len(shape) == 2 and self._is_quantized(layer):
            return dequantize(self._load(layer, (shape[0], shape[1])))
        return super().take_unconverted(name, shape)

    def take_linear(
        self,
        name: str,
        shape: tuple[int, int],
        factors: torch.Tensor | None = None,
        divisors: torch.Tensor | None = None,
    ) -> Weight:
        """Return the weight of the layer `name`, [outputs, inputs], dequantized or not.

        Args:
            factors: of the inputs, [inputs], by which a weight is multiplied before it is quantized.
            divisors: of the outputs, [outputs], by which it is divided.
        """
        if self._is_quantized(name):
            return self._load(name, shape)
        weight = super().take(f"{name}{_WEIGHT}", shape)
        if factors is not None:
            weight = weight * factors.to(weight)
        if divisors is not None:
            weight = weight / divisors.to(weight)[:, None]
        return weight if self._quantization == "none" else quantize(weight, self._quantization)

    @property
    def is_int8(self) -> bool:
        """Return whether layers are smoothed (`architectures.smoothing`) and then quantized to 8-bit integers."""
        return self._quantization == "int8"

    @contextmanager
    def disable_quantization(self) -> Iterator[None]:
        """Return weights in the dtype during the context."""
        quantization, self._quantization = self._quantization, "none"
        try:
            yield
        finally:
            self._quantization = quantization

    def _is_quantized(self, layer: str) -> bool:
        return self._form is not None and any(self.has(f"{layer}.{mark}") for mark in _FORMATS[self._form.name][1])

    def _load(self, layer: str, shape: tuple[int, int]) -> Weight:
        if self._form is None:
            raise RuntimeError("the checkpoint is not quantized")
        return _FORMATS[self._form.name][0](self, layer, shape, self._form)


def take_linear(
    weights: Weights,
    name: str,
    shape: tuple[int, int],
    factors: torch.Tensor | None = None,
    divisors: torch.Tensor | None = None,
) -> Weight:
    """Return the weight of the layer `name`, [outputs, inputs], in its format if `weights` supports formats.

    Args:
        factors, divisors: as in `LinearWeights.take_linear`; None if `weights` does not support formats.
    """
    if isinstance(weights, LinearWeights):
        return weights.take_linear(name, shape, factors, divisors)
    return weights.take(f"{name}{_WEIGHT}", shape)
