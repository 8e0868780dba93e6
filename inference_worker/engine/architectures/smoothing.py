"""Smoothing of layers before they are quantized to 8-bit integers.

The inputs of a product share a scale in groups of consecutive channels. If one channel of a group is much larger than
the others, few of the 8 bits are left for them. So channels are divided by factors, and the columns of the weights that
read them are multiplied by these factors (SmoothQuant, arXiv:2211.10438). The channels are those after a norm, and the
inputs of a feed-forward block's last product. A factor is a power of the channel's root mean square, rounded to a power
of two. Then neither operation rounds.

The root mean squares are those of random tokens, which pass through each layer before it is quantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from inference_worker.checkpoints.model_config import ModelConfig
from inference_worker.engine.architectures.encoder import Packing
from inference_worker.engine.architectures.feed_forward import FeedForward, GatedFeedForward
from inference_worker.engine.architectures.layers import Linear, RMSNorm
from inference_worker.engine.architectures.packed_attention import PackedAttention, describe
from inference_worker.engine.architectures.rope import Rotation
from inference_worker.engine.attention.base import AttentionBackend, AttentionSpec, StepMetadata

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TOKENS = 256
_NORM_EXPONENT, _INNER_EXPONENT = 0.5, 0.2  # powers of a root mean square; see docs/reference/model-formats.md
_MAX_POWER = 8  # the largest factor is 2 to this power
_TINY = 1e-12  # smallest mean square


@dataclass(frozen=True, slots=True)
class LayerFactors:
    """The factors of a layer's channels, float32; None: they are not divided."""

    attention: torch.Tensor | None = None  # [hidden], after the norm before attention
    mlp: torch.Tensor | None = None  # [hidden], after the norm before the feed-forward block
    inner: torch.Tensor | None = None  # [intermediate], of activation(gate) · up


class SmoothedLayer(Protocol):
    """The parts of a decoder layer that are measured."""

    before_attention: RMSNorm | None
    before_mlp: RMSNorm | None
    mlp: FeedForward

    def forward(
        self, hidden: torch.Tensor, rotation: Rotation, attention: AttentionBackend, metadata: StepMetadata
    ) -> torch.Tensor: ...


class Smoothing:
    """The hidden states of random tokens, which pass through the layers one after another.

    Args:
        dtype: of the products and of attention.
        embed: returns the hidden states [tokens, hidden] of token ids.
    """

    def __init__(
        self,
        config: ModelConfig,
        specs: Sequence[AttentionSpec],
        dtype: torch.dtype,
        embed: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        tokens = min(_TOKENS, config.max_model_len)
        generator = torch.Generator().manual_seed(0)
        hidden = embed(torch.randint(config.vocab_size, (tokens,), generator=generator))
        packing = Packing([tokens], hidden.device)
        self._hidden, self._metadata = hidden, describe(packing)
        self._attention = PackedAttention(config, specs, dtype, hidden.device)
        self.positions = packing.positions

    def measure(self, layer: SmoothedLayer, rotation: Rotation) -> LayerFactors:
        """Pass the tokens through `layer`, which is not quantized, and return its factors."""
        before_attention, before_mlp = _RecordingNorm(layer.before_attention), _RecordingNorm(layer.before_mlp)
        layer.before_attention, layer.before_mlp = before_attention, before_mlp
        down = None
        if isinstance(layer.mlp, GatedFeedForward):
            layer.mlp.down = down = _RecordingLinear(layer.mlp.down)
        self._hidden = layer.forward(self._hidden, rotation, self._attention, self._metadata)
        attention = _factors(before_attention.squares, _NORM_EXPONENT)
        if down is None:  # a router reads the same channels as its experts, and stays in the dtype
            return LayerFactors(attention)
        return LayerFactors(
            attention, _factors(before_mlp.squares, _NORM_EXPONENT), _factors(down.squares, _INNER_EXPONENT)
        )


class _RecordingNorm(RMSNorm):
    """A norm, or none, that records the mean squares of its output's channels."""

    def __init__(self, norm: RMSNorm | None) -> None:
        self._norm = norm
        self.squares: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._norm is None:
            return x
        out = self._norm(x)
        self.squares = out.float().square().mean(0)
        return out


class _RecordingLinear(Linear):
    """A linear layer that records the mean squares of its input's channels."""

    def __init__(self, layer: Linear) -> None:
        self._layer = layer
        self.squares: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.squares = x.float().square().mean(0)
        return self._layer(x)

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        self.squares = x.float().square().mean(0)
        return self._layer.add(x, other)


def _factors(squares: torch.Tensor | None, exponent: float) -> torch.Tensor | None:
    """Return the factors of the channels with these mean squares. Their geometric mean is about 1."""
    if squares is None:
        return None
    powers = squares.clamp_min(_TINY).log2() * (exponent / 2)
    return torch.exp2((powers - powers.mean()).round().clamp(-_MAX_POWER, _MAX_POWER))
