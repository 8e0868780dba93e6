"""The ModernBERT family: an encoder with rotary positions, windowed attention in most layers and a gated GELU."""

from __future__ import annotations

import torch
from torch.nn import functional

from inference_worker.checkpoints.encoder_config import EncoderConfig
from inference_worker.engine.architectures.bert import head, linear
from inference_worker.engine.architectures.encoder import Packing
from inference_worker.engine.architectures.layers import LayerNorm, Layers
from inference_worker.engine.loading.loader import Weights


class ModernBertEncoder:
    """An encoder: normalized embeddings, then layers of attention and feed-forward with pre-normalization.

    The first layer does not normalize the input of its attention again.
    """

    def __init__(self, config: EncoderConfig, weights: Weights, layers: Layers) -> None:
        hidden, prefix = config.hidden_size, config.prefix
        self._words = weights.take(f"{prefix}embeddings.tok_embeddings.weight", (config.vocab_size, hidden))
        self._norm = _layer_norm(config, weights, layers, f"{prefix}embeddings.norm")
        self._layers = [_Layer(config, weights, layers, index) for index in range(config.num_layers)]
        self._final_norm = _layer_norm(config, weights, layers, f"{prefix}final_norm")
        self._rotations = {theta: _Rotation(config, theta, self._words.device) for theta in set(config.rope_thetas)}
        if config.is_cross_encoder:
            self._dense = head(layers, weights, "head.dense", hidden, hidden, bias=config.classifier_bias)
            self._head_norm = _layer_norm(config, weights, layers, "head.norm")
            self._classifier = head(layers, weights, "classifier", 1, hidden)

    def forward(self, token_ids: torch.Tensor, packing: Packing) -> torch.Tensor:
        hidden = self._norm(functional.embedding(token_ids, self._words))
        tables = {theta: rotation.at(packing.positions) for theta, rotation in self._rotations.items()}
        for layer in self._layers:
            hidden = layer.forward(hidden, packing, *tables[layer.theta])
        return self._final_norm(hidden)

    def score(self, pooled: torch.Tensor) -> torch.Tensor:
        return self._classifier(self._head_norm(functional.gelu(self._dense(pooled))))


def _layer_norm(config: EncoderConfig, weights: Weights, layers: Layers, name: str) -> LayerNorm:
    shape = (config.hidden_size,)
    bias = weights.take(f"{name}.bias", shape) if config.norm_bias else None
    return layers.layer_norm(weights.take(f"{name}.weight", shape), bias, config.layer_norm_eps)


class _Rotation:
    """Rotary position embeddings of one base frequency, up to the longest input."""

    def __init__(self, config: EncoderConfig, theta: float, device: torch.device) -> None:
        head_dim = config.hidden_size // config.num_heads
        frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.outer(torch.arange(config.max_model_len).float(), frequencies)
        self._cos, self._sin = angles.cos().to(device), angles.sin().to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, each [tokens, 1, 1, head_dim / 2]."""
        cos, sin = (table.index_select(0, positions)[:, None, None] for table in (self._cos, self._sin))
        return cos, sin


def _rotate(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return [tokens, 3, heads, head_dim] with rotated queries and keys. The rotation is computed in float32."""
    first, second = qkv[:, :2].float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated.to(qkv.dtype), qkv[:, 2:]), dim=1)


class _Layer:
    def __init__(self, config: EncoderConfig, weights: Weights, layers: Layers, index: int) -> None:
        hidden, inner, prefix = config.hidden_size, config.intermediate_size, f"{config.prefix}layers.{index}"
        self._heads = config.num_heads
        self._window, self.theta = config.windows[index], config.rope_thetas[index]
        self._attention_norm = _layer_norm(config, weights, layers, f"{prefix}.attn_norm") if index else None
        self._qkv = linear(layers, weights, (f"{prefix}.attn.Wqkv",), 3 * hidden, hidden, bias=config.attention_bias)
        self._out = linear(layers, weights, (f"{prefix}.attn.Wo",), hidden, hidden, bias=config.attention_bias)
        self._mlp_norm = _layer_norm(config, weights, layers, f"{prefix}.mlp_norm")
        self._up = linear(layers, weights, (f"{prefix}.mlp.Wi",), 2 * inner, hidden, bias=config.mlp_bias)
        self._down = linear(layers, weights, (f"{prefix}.mlp.Wo",), hidden, inner, bias=config.mlp_bias)

    def forward(self, hidden: torch.Tensor, packing: Packing, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normalized = hidden if self._attention_norm is None else self._attention_norm(hidden)
        qkv = self._qkv(normalized).view(len(hidden), 3, self._heads, -1)
        hidden = self._out.add(packing.attend(_rotate(qkv, cos, sin), self._window), hidden)
        inputs, gate = self._up(self._mlp_norm(hidden)).chunk(2, dim=-1)
        return self._down.add(functional.gelu(inputs) * gate, hidden)
