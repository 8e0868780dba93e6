"""The BERT family: encoders with bidirectional attention, which need one pass and no cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from inference_worker.contract.encoder_config import EncoderConfig
from inference_worker.engine.architectures.layers import Linear
from inference_worker.models.loader import Weights

PADDING = 1 / 8  # maximum share of padding in a group's rows; only attention sees padding


class Packing:
    """The places of a batch's inputs among its tokens, which are concatenated without padding.

    Attention is computed for groups of inputs of similar length. `lengths` must not increase. Then a group is a slice
    of the
    tokens, and a group of equal lengths needs neither gathering nor a mask.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        counts = torch.tensor(lengths, device=device)
        self.lengths = counts
        self.ends = counts.cumsum(0)
        self.starts = self.ends - counts
        self.inputs = torch.repeat_interleave(torch.arange(len(lengths), device=device), counts)  # of each token
        self.positions = torch.arange(int(sum(lengths)), device=device) - self.starts.index_select(0, self.inputs)
        self.groups: list[_Group] = []
        first = token = 0
        for last in range(1, len(lengths) + 1):
            if last == len(lengths) or lengths[last] < lengths[first] * (1 - PADDING):
                members = lengths[first:last]
                self.groups.append(_Group(token, members, device))
                token += sum(members)
                first = last


class _Group:
    """Inputs of similar length: the batch's tokens from `start` to `end`."""

    def __init__(self, start: int, lengths: Sequence[int], device: torch.device) -> None:
        self.start, self.end = start, start + sum(lengths)
        self.count, self.longest = len(lengths), lengths[0]
        self.mask: torch.Tensor | None = None  # [inputs, 1, 1, longest]: places that contain tokens; None: all
        if lengths[-1] < lengths[0]:
            holds = torch.arange(self.longest, device=device) < torch.tensor(lengths, device=device)[:, None]
            self.mask = holds[:, None, None, :]
            self.places = holds.flatten().nonzero().squeeze(1)  # of the tokens

    def attend(self, qkv: torch.Tensor, heads: int) -> torch.Tensor:
        """Return the attention [tokens, hidden] over the group's rows [tokens, 3 × hidden]."""
        rows = qkv[self.start : self.end]
        if self.mask is not None:
            rows = rows.new_zeros(self.count * self.longest, rows.shape[1]).index_copy_(0, self.places, rows)
        q, k, v = rows.view(self.count, self.longest, 3, heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, self.mask)
        mixed = mixed.transpose(1, 2).reshape(-1, qkv.shape[1] // 3)
        return mixed if self.mask is None else mixed.index_select(0, self.places)


class BertEncoder:
    """An encoder: embeddings, then layers of attention and feed-forward with residual additions and
    post-normalization."""

    def __init__(self, config: EncoderConfig, weights: Weights) -> None:
        hidden = config.hidden_size
        self._words = weights.take("embeddings.word_embeddings.weight", (config.vocab_size, hidden))
        positions = weights.take("embeddings.position_embeddings.weight", (config.num_positions, hidden))
        types = weights.take("embeddings.token_type_embeddings.weight", (config.num_token_types, hidden))
        self._positions = positions[config.first_position :] + types[0]  # every token has the first type
        self._norm = _LayerNorm(config, weights, "embeddings.LayerNorm")
        self._layers = [_Layer(config, weights, f"encoder.layer.{index}") for index in range(config.num_layers)]

    def forward(self, token_ids: torch.Tensor, packing: Packing) -> torch.Tensor:
        """Return hidden states [tokens, hidden] for the token ids [tokens] of the packed inputs."""
        hidden = functional.embedding(token_ids, self._words)
        hidden = self._norm(hidden + self._positions.index_select(0, packing.positions))
        for layer in self._layers:
            hidden = layer.forward(hidden, packing)
        return hidden


class _LayerNorm:
    def __init__(self, config: EncoderConfig, weights: Weights, name: str) -> None:
        self._shape = (config.hidden_size,)
        self._weight, self._bias = (weights.take(f"{name}.{part}", self._shape) for part in ("weight", "bias"))
        self._eps = config.layer_norm_eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


class _Layer:
    def __init__(self, config: EncoderConfig, weights: Weights, prefix: str) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self._heads = config.num_heads

        def linear(names: tuple[str, ...], outs: int, inputs: int) -> Linear:
            parts = [weights.take(f"{prefix}.{name}.weight", (outs, inputs)) for name in names]
            return Linear(torch.cat(parts), torch.cat([weights.take(f"{prefix}.{n}.bias", (outs,)) for n in names]))

        attention = ("attention.self.query", "attention.self.key", "attention.self.value")
        self._qkv = linear(attention, hidden, hidden)
        self._out = linear(("attention.output.dense",), hidden, hidden)
        self._attention_norm = _LayerNorm(config, weights, f"{prefix}.attention.output.LayerNorm")
        self._up = linear(("intermediate.dense",), inner, hidden)
        self._down = linear(("output.dense",), hidden, inner)
        self._output_norm = _LayerNorm(config, weights, f"{prefix}.output.LayerNorm")

    def forward(self, hidden: torch.Tensor, packing: Packing) -> torch.Tensor:
        qkv = self._qkv(hidden)
        attended = torch.cat([group.attend(qkv, self._heads) for group in packing.groups])
        hidden = self._attention_norm(self._out.add(attended, hidden))
        return self._output_norm(self._down.add(functional.gelu(self._up(hidden)), hidden))
