"""Decoders as embedding models and cross-encoders, by the hidden state of the last token. There is no KV cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from inference_worker.checkpoints.encoder_config import EncoderConfig
from inference_worker.checkpoints.model_config import ModelConfig, ModelError
from inference_worker.checkpoints.pair_scoring import PairScoring
from inference_worker.engine.architectures import load_model
from inference_worker.engine.architectures.encoder import Packing
from inference_worker.engine.architectures.layers import Layers
from inference_worker.engine.architectures.packed_attention import PackedAttention, describe
from inference_worker.engine.loading.loader import Weights
from inference_worker.engine.quantization.linear_weights import LinearWeights, take_linear
from inference_worker.engine.quantization.weights import Weight

_PREFIX = "model."


class CausalEncoder:
    """A decoder of any family without its head."""

    def __init__(self, config: EncoderConfig, weights: Weights, layers: Layers) -> None:
        if config.decoder is None:
            raise ModelError(f"{config.architecture} is not a decoder")
        # Checkpoints of embedding models need no head. The tied head takes no weight of its own.
        decoder = dataclasses.replace(config.decoder, tie_word_embeddings=True)
        self._model = load_model(decoder, _WithoutPrefix(weights), layers)
        self._model.remove_head()
        specs = self._model.attention_specs
        if any(spec.soft_cap for spec in specs):
            raise ModelError(f"{config.architecture}: embedding models with a soft cap are not supported")
        self._attention = PackedAttention(config.decoder, specs, weights.dtype, weights.device)
        self._score = _score_weight(config.decoder, config.pair_scoring, weights) if config.pair_scoring else None

    def forward(self, token_ids: torch.Tensor, packing: Packing) -> torch.Tensor:
        return self._model.normalize(self._model.forward(token_ids, self._attention, describe(packing)))

    def score(self, pooled: torch.Tensor) -> torch.Tensor:
        assert self._score is not None  # noqa: S101  (the runner calls it only for cross-encoders)
        return pooled @ self._score


def _score_weight(decoder: ModelConfig, scoring: PairScoring, weights: Weights) -> torch.Tensor:
    """Return the weight of the score [hidden, 1]: the head's row of the token, less that of the other token."""
    if decoder.logit_soft_cap:
        raise ModelError(f"{decoder.architecture}: cross-encoders with a soft cap are not supported")
    name = f"{_PREFIX}embed_tokens.weight" if decoder.tie_word_embeddings else "lm_head.weight"
    tokens = [scoring.token] if scoring.other_token is None else [scoring.token, scoring.other_token]
    if not 0 <= min(tokens) <= max(tokens) < decoder.vocab_size:
        raise ModelError(f"the score's tokens {tokens} are not in the vocabulary of {decoder.vocab_size} tokens")
    head = _WithoutPrefix(weights).take(name, (decoder.vocab_size, decoder.hidden_size))
    row = head[scoring.token].clone()
    if scoring.other_token is not None:
        row -= head[scoring.other_token]
    return row[:, None] / decoder.logit_divisor


class _WithoutPrefix(LinearWeights):
    """The tensors of a checkpoint whose names may lack the prefix `model.`, as sentence-transformers writes them."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._prefix = "" if weights.has(f"{_PREFIX}embed_tokens.weight") else _PREFIX  # missing in the names

    def has(self, name: str) -> bool:
        return self._weights.has(self._strip_prefix(name))

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._weights.take(self._strip_prefix(name), shape)

    def take_unconverted(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._weights.take_unconverted(self._strip_prefix(name), shape)

    def is_mapped(self, name: str, tensor: torch.Tensor) -> bool:
        return self._weights.is_mapped(self._strip_prefix(name), tensor)

    def take_linear(
        self,
        name: str,
        shape: tuple[int, int],
        factors: torch.Tensor | None = None,
        divisors: torch.Tensor | None = None,
    ) -> Weight:
        return take_linear(self._weights, self._strip_prefix(name), shape, factors, divisors)

    @property
    def is_int8(self) -> bool:
        return isinstance(self._weights, LinearWeights) and self._weights.is_int8

    @contextmanager
    def disable_quantization(self) -> Iterator[None]:
        with self._weights.disable_quantization() if isinstance(self._weights, LinearWeights) else nullcontext():
            yield

    def _strip_prefix(self, name: str) -> str:
        return name.removeprefix(self._prefix)
