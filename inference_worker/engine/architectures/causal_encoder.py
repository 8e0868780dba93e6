"""Decoders as embedding models and cross-encoders, by the hidden state of the last token. There is no KV cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from inference_worker.contract.config import ModelConfig, ModelError
from inference_worker.contract.encoder_config import EncoderConfig
from inference_worker.contract.pair_scoring import PairScoring
from inference_worker.engine.architectures import load_model
from inference_worker.engine.architectures.encoder import Packing
from inference_worker.engine.architectures.layers import Layers
from inference_worker.engine.attention.base import AttentionBackend, AttentionSpec, CacheShape, StepMetadata
from inference_worker.engine.quantization.linear_weights import LinearWeights, take_linear
from inference_worker.engine.quantization.weights import Weight
from inference_worker.models.loader import Weights

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
        self._attention = _PackedAttention(config, specs, weights)
        self._score = _score_weight(config.decoder, config.pair_scoring, weights) if config.pair_scoring else None

    def forward(self, token_ids: torch.Tensor, packing: Packing) -> torch.Tensor:
        nothing = packing.starts.new_empty(0)
        lengths = packing.lengths.tolist()
        metadata = StepMetadata(
            num_seqs=len(lengths),
            num_tokens=len(token_ids),
            num_decodes=0,
            query_lens=lengths,
            lengths=lengths,
            query_start_loc=nothing,
            seq_lens=packing.lengths,
            block_table=nothing,
            slot_mapping=nothing,
            positions=packing.positions,
            plan=packing,
        )
        return self._model.normalize(self._model.forward(token_ids, self._attention, metadata))

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


class _PackedAttention(AttentionBackend):
    """Attention within the inputs of one pass. Nothing is cached."""

    def __init__(self, config: EncoderConfig, specs: Sequence[AttentionSpec], weights: Weights) -> None:
        decoder = config.decoder
        assert decoder is not None  # noqa: S101  (checked by the encoder)
        shape = CacheShape(
            decoder.num_layers, 0, 1, decoder.num_kv_heads, decoder.head_dim, weights.dtype, weights.device
        )
        super().__init__(shape, decoder.num_heads, specs)

    def pages(self) -> list[torch.Tensor]:
        return []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: StepMetadata
    ) -> torch.Tensor:
        packing: Packing = metadata.plan
        spec = self.specs[layer]
        return packing.attend_causally(query, key, value, spec.scale, spec.window)


class _WithoutPrefix(LinearWeights):
    """The tensors of a checkpoint whose names may lack the prefix `model.`, as sentence-transformers writes them."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._prefix = "" if weights.has(f"{_PREFIX}embed_tokens.weight") else _PREFIX  # that the names lack

    def has(self, name: str) -> bool:
        return self._weights.has(self._stored(name))

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._weights.take(self._stored(name), shape)

    def take_linear(self, name: str, shape: tuple[int, int]) -> Weight:
        return take_linear(self._weights, self._stored(name), shape)

    def _stored(self, name: str) -> str:
        return name.removeprefix(self._prefix)
