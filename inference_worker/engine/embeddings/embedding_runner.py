"""The forward pass of a batch of inputs through an encoder. It returns a vector or a score for each input."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from inference_worker.checkpoints.encoder_config import EncoderConfig, Family
from inference_worker.contract.compute_support import SlowReason
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.engine.architectures.bert import BertEncoder
from inference_worker.engine.architectures.causal_encoder import CausalEncoder
from inference_worker.engine.architectures.encoder import Encoder, Packing
from inference_worker.engine.architectures.layers import Layers
from inference_worker.engine.architectures.modernbert import ModernBertEncoder
from inference_worker.engine.compute_path import choose_path
from inference_worker.engine.loading.loader import Weights
from inference_worker.engine.quantization.linear_weights import LinearWeights

log = logging.getLogger(__name__)

Vectors = NDArray[np.float32]


_ENCODERS: Mapping[Family, Callable[[EncoderConfig, Weights, Layers], Encoder]] = {
    "bert": BertEncoder,
    "roberta": BertEncoder,
    "modernbert": ModernBertEncoder,
    "decoder": CausalEncoder,
}


class Embedder(Protocol):
    """The interface of embedding runners."""

    @property
    def slow(self) -> SlowReason | None:
        """Return why the model uses a slower backend than the machine's default, or None."""

    def embed(self, inputs: Sequence[Sequence[int]], second_starts: Sequence[int] | None = None) -> Vectors:
        """Return a vector for each input, [inputs, dimensions]. Each input has at least one token id.

        A cross-encoder returns its score as a vector with one number.

        Args:
            second_starts: for pairs of texts, the position of the second text in each input.
        """


class EmbeddingRunner:
    """An encoder on one device."""

    def __init__(self, config: EngineConfig, model_config: EncoderConfig) -> None:
        self._config = model_config
        path = choose_path(config, is_encoder=True)
        self.device, self.dtype, self._kernels = path.device, path.dtype, path.kernels
        with (
            torch.inference_mode(),
            LinearWeights(config.model_dir, self.dtype, self.device, quantization=config.quantization) as weights,
        ):
            layers = Layers(kernels=self._kernels)
            self._model = _ENCODERS[model_config.family](model_config, weights, layers)
        self.slow = path.slow or (SlowReason.SHAPE if layers.unsupported else None)
        log.info("%s", path.describe(path.dtype_name if config.quantization == "none" else config.quantization))

    @torch.inference_mode()
    def embed(self, inputs: Sequence[Sequence[int]], second_starts: Sequence[int] | None = None) -> Vectors:
        order = sorted(range(len(inputs)), key=lambda n: -len(inputs[n]))
        tokens = np.concatenate([np.asarray(inputs[n], dtype=np.int64) for n in order])
        sorted_starts = None if second_starts is None else [second_starts[n] for n in order]
        packing = Packing([len(inputs[n]) for n in order], self.device, sorted_starts, self._kernels)
        hidden = self._model.forward(torch.from_numpy(tokens).to(self.device), packing)
        found = self._pool(hidden, packing)
        if self._config.is_cross_encoder:
            scores = self._model.score(found.to(self.dtype)).float()
            found = scores.sigmoid() if self._config.sigmoid else scores
        elif self._config.normalize:
            found = functional.normalize(found, dim=1)
        vectors = np.empty((len(inputs), found.shape[1]), dtype=np.float32)
        vectors[order] = found.cpu().numpy()
        return vectors

    def _pool(self, hidden: torch.Tensor, packing: Packing) -> torch.Tensor:
        if self._config.pooling == "cls":
            return hidden.index_select(0, packing.starts).float()
        if self._config.pooling == "last":
            return hidden.index_select(0, packing.ends - 1).float()
        sums = hidden.new_zeros(len(packing.lengths), hidden.shape[1], dtype=torch.float32)
        return sums.index_add_(0, packing.inputs, hidden.float()) / packing.lengths[:, None]
