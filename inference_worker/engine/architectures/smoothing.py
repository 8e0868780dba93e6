"""Smoothing of layers before they are quantized to 8-bit integers.

The inputs of a product share a scale in groups of consecutive channels. If one channel of a group is much larger than
the others, few of the 8 bits are left for them. So the channels after a norm are divided by factors, and the columns of
the weights that read them are multiplied by these factors. A factor is the root of the channel's root mean square
(SmoothQuant, arXiv:2211.10438, with an exponent of 0.5), rounded to a power of two. Then neither operation rounds.

The root mean squares are those of random tokens, which pass through each layer before it is quantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from inference_worker.contract.config import ModelConfig
from inference_worker.engine.architectures.encoder import Packing
from inference_worker.engine.architectures.feed_forward import GatedFeedForward
from inference_worker.engine.architectures.layers import RMSNorm
from inference_worker.engine.architectures.packed_attention import PackedAttention, describe
from inference_worker.engine.architectures.rope import Rotation
from inference_worker.engine.attention.base import AttentionSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inference_worker.engine.architectures.decoder import DecoderLayer

_TOKENS = 256
_MAX_EXPONENT = 8  # of a factor
_TINY = 1e-12  # of a mean square


@dataclass(frozen=True, slots=True)
class LayerFactors:
    """The factors of a layer's channels, float32 [hidden]; None: the product's input is not the output of a norm."""

    attention: torch.Tensor | None = None
    mlp: torch.Tensor | None = None


class Smoothing:
    """The hidden states of random tokens, which pass through the layers one after another.

    Args:
        embed: returns the hidden states [tokens, hidden] of token ids.
    """

    def __init__(
        self, config: ModelConfig, specs: Sequence[AttentionSpec], embed: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        tokens = min(_TOKENS, config.max_model_len)
        generator = torch.Generator().manual_seed(0)
        hidden = embed(torch.randint(config.vocab_size, (tokens,), generator=generator))
        packing = Packing([tokens], hidden.device)
        self._hidden, self._metadata = hidden, describe(packing)
        self._attention = PackedAttention(config, specs, hidden.dtype, hidden.device)
        self.positions = packing.positions

    def measure(self, layer: DecoderLayer, rotation: Rotation) -> LayerFactors:
        """Pass the tokens through `layer`, which is not quantized, and return its factors."""
        before_attention, before_mlp = _Recorder(layer.before_attention), _Recorder(layer.before_mlp)
        layer.before_attention, layer.before_mlp = before_attention, before_mlp
        self._hidden = layer.forward(self._hidden, rotation, self._attention, self._metadata)
        # A router reads the same channels as its experts, and stays in the dtype.
        return LayerFactors(
            before_attention.factors(), before_mlp.factors() if isinstance(layer.mlp, GatedFeedForward) else None
        )


class _Recorder(RMSNorm):
    """A norm, or none, that records the mean squares of its output's channels."""

    def __init__(self, norm: RMSNorm | None) -> None:
        self._norm = norm
        self._squares = torch.empty(0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._norm is None:
            return x
        out = self._norm(x)
        self._squares = out.float().square().mean(0)
        return out

    def factors(self) -> torch.Tensor | None:
        if self._norm is None:
            return None
        exponents = self._squares.clamp_min(_TINY).log2() / 4  # of a root mean square's square root
        exponents = (exponents - exponents.mean()).round().clamp(-_MAX_EXPONENT, _MAX_EXPONENT)
        return torch.exp2(exponents)
