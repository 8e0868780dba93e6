"""The BERT and RoBERTa families: encoders with bidirectional attention and learned positions."""

from __future__ import annotations

import torch
from torch.nn import functional

from inference_worker.checkpoints.encoder_config import EncoderConfig
from inference_worker.engine.architectures.encoder import Packing
from inference_worker.engine.architectures.feed_forward import take_together
from inference_worker.engine.architectures.layers import LayerNorm, Layers, Linear
from inference_worker.engine.loading.loader import Weights


class BertEncoder:
    """An encoder: embeddings, then layers of attention and feed-forward with residual additions and
    post-normalization."""

    def __init__(self, config: EncoderConfig, weights: Weights, layers: Layers) -> None:
        hidden, prefix = config.hidden_size, config.prefix
        self._words = weights.take(f"{prefix}embeddings.word_embeddings.weight", (config.vocab_size, hidden))
        positions = weights.take(f"{prefix}embeddings.position_embeddings.weight", (config.num_positions, hidden))
        positions = positions[config.first_position :]
        types = weights.take(f"{prefix}embeddings.token_type_embeddings.weight", (config.num_token_types, hidden))
        # The rows for tokens of the first text, then, if the model has token types, those for the second text.
        self._positions = torch.cat([positions + type_ for type_ in types[:2]])
        self._second_offset = len(positions) if config.num_token_types > 1 else 0
        self._norm = _layer_norm(config, weights, layers, f"{prefix}embeddings.LayerNorm")
        self._layers = [_Layer(config, weights, layers, f"{prefix}encoder.layer.{n}") for n in range(config.num_layers)]
        if config.is_cross_encoder:
            dense, out = (
                ("classifier.dense", "classifier.out_proj")
                if config.family == "roberta"
                else (f"{prefix}pooler.dense", "classifier")
            )
            self._pooler = head(layers, weights, dense, hidden, hidden)
            self._classifier = head(layers, weights, out, 1, hidden)

    def forward(self, token_ids: torch.Tensor, packing: Packing) -> torch.Tensor:
        hidden = functional.embedding(token_ids, self._words)
        places = packing.positions
        if packing.is_second is not None:
            places = places + packing.is_second * self._second_offset
        hidden = self._norm(hidden + self._positions.index_select(0, places))
        for layer in self._layers:
            hidden = layer.forward(hidden, packing)
        return hidden

    def score(self, pooled: torch.Tensor) -> torch.Tensor:
        return self._classifier(torch.tanh(self._pooler(pooled)))


def linear(
    layers: Layers, weights: Weights, names: tuple[str, ...], outs: int, inputs: int, *, bias: bool = True
) -> Linear:
    """Return one layer for the layers with these names, whose outputs are concatenated."""
    return layers.linear(*take_together(weights, names, [outs] * len(names), inputs, bias=bias))


def head(layers: Layers, weights: Weights, name: str, outs: int, inputs: int, *, bias: bool = True) -> Linear:
    """Return a layer of a cross-encoder's score, which is not quantized."""
    weight = weights.take(f"{name}.weight", (outs, inputs))
    return layers.linear(weight, weights.take(f"{name}.bias", (outs,)) if bias else None)


def _layer_norm(config: EncoderConfig, weights: Weights, layers: Layers, name: str) -> LayerNorm:
    weight, bias = (weights.take(f"{name}.{part}", (config.hidden_size,)) for part in ("weight", "bias"))
    return layers.layer_norm(weight, bias, config.layer_norm_eps)


class _Layer:
    def __init__(self, config: EncoderConfig, weights: Weights, layers: Layers, prefix: str) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self._heads = config.num_heads
        attention = tuple(f"{prefix}.attention.self.{name}" for name in ("query", "key", "value"))
        self._qkv = linear(layers, weights, attention, hidden, hidden)
        self._out = linear(layers, weights, (f"{prefix}.attention.output.dense",), hidden, hidden)
        self._attention_norm = _layer_norm(config, weights, layers, f"{prefix}.attention.output.LayerNorm")
        self._up = layers.gelu_linear(
            *take_together(weights, [f"{prefix}.intermediate.dense"], [inner], hidden, bias=True)
        )
        self._down = linear(layers, weights, (f"{prefix}.output.dense",), hidden, inner)
        self._output_norm = _layer_norm(config, weights, layers, f"{prefix}.output.LayerNorm")

    def forward(self, hidden: torch.Tensor, packing: Packing) -> torch.Tensor:
        attended = packing.attend(self._qkv(hidden).view(len(hidden), 3, self._heads, -1))
        hidden = self._attention_norm(self._out.add(attended, hidden))
        return self._output_norm(self._down.add(self._up(hidden), hidden))
