"""Rotary position embeddings."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import Protocol

import torch

from inference_worker.checkpoints.model_config import RopeConfig
from kernels import reference
from kernels.native import operators
from kernels.native.library import Library


class Rotation(Protocol):
    """The rotation of a step's queries and keys."""

    def apply(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return qkv, [num_tokens, heads, head_dim], with queries and keys rotated. It may be overwritten."""


class NoRotation:
    """The rotation of layers without rotary embedding."""

    def apply(self, qkv: torch.Tensor) -> torch.Tensor:
        return qkv


@dataclass(frozen=True, slots=True)
class NativeRotation:
    """The rotation by the C kernels, in place."""

    step: operators.RotationStep
    heads: int  # heads of queries and keys, the first ones

    def apply(self, qkv: torch.Tensor) -> torch.Tensor:
        self.step.apply(qkv[:, : self.heads])
        return qkv


@dataclass(frozen=True, slots=True)
class PlainRotation:
    """The rotation of a step's queries and keys, by halves: dimension i is paired with dimension i + rotary / 2.

    Values go through the same operations as queries and keys, with a rotation by zero, because each operation of each
    layer has a fixed cost.
    """

    cos: torch.Tensor  # [num_tokens, heads, head_dim] of queries, keys and values: 1 where nothing is rotated
    sin: torch.Tensor  # the same, with the signs of rotation by halves, and 0
    rotary: int  # dimensions that are rotated, the first ones of each head
    separate: bool  # round each product, as the batch-invariant mode requires

    def apply(self, qkv: torch.Tensor) -> torch.Tensor:
        half = self.rotary // 2
        if self.rotary == qkv.shape[-1]:
            partner = torch.roll(qkv, half, -1)
        else:
            partner = torch.cat((qkv[..., half : self.rotary], qkv[..., :half], qkv[..., self.rotary :]), dim=-1)
        if self.separate:
            return (qkv * self.cos).add_(partner.mul_(self.sin))
        return torch.addcmul(qkv * self.cos, partner, self.sin)


class Rope:
    """A rotary position embedding, with tables of cos and sin up to the model's maximum context.

    Args:
        num_rotated, num_plain: heads of queries and keys, and heads of values.
        kernels: the C kernels; None: PyTorch rotates.
    """

    def __init__(
        self, config: RopeConfig, head_dim: int, max_positions: int, num_rotated: int, num_plain: int,
        dtype: torch.dtype, device: torch.device, *,
        batch_invariant: bool = False, kernels: Library | None = None,
    ) -> None:  # fmt: skip
        self._rotary = config.rotary_dim or head_dim
        frequencies = inverse_frequencies(config, self._rotary, max_positions)
        cos, sin = (table * config.attention_factor for table in reference.rope_tables(frequencies, max_positions))
        self._cos, self._sin = cos.to(device), sin.to(device)
        self._head_dim, self._dtype, self._separate = head_dim, dtype, batch_invariant
        self._heads, self._plain = num_rotated, num_plain
        self._kernels = kernels

    def at(self, positions: torch.Tensor) -> Rotation:
        """Return the rotation of tokens at integer positions [num_tokens]."""
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        if self._kernels is not None:
            step = operators.RotationStep(self._kernels, cos, sin, self._heads, self._head_dim)
            return NativeRotation(step, self._heads)
        return PlainRotation(
            self._widen(torch.cat((cos, cos), dim=-1), 1.0),
            self._widen(torch.cat((-sin, sin), dim=-1), 0.0),
            self._rotary,
            self._separate,
        )

    def _widen(self, table: torch.Tensor, neutral: float) -> torch.Tensor:
        """Return the table for all heads: [num_tokens, heads, head_dim]. Values get the neutral number."""
        rotated = table.to(self._dtype)[:, None].expand(-1, self._heads, -1)
        wide = torch.full(
            (len(table), self._heads + self._plain, self._head_dim), neutral, dtype=self._dtype, device=table.device
        )
        wide[:, : self._heads, : self._rotary] = rotated
        return wide


def inverse_frequencies(config: RopeConfig, rotary: int, max_positions: int) -> torch.Tensor:
    """Return the angle per position of each pair of dimensions, float32 [rotary / 2].

    Longrope has two sets of factors, for short and for long contexts. The model's limit of tokens chooses between them,
    because keys in the cache must not depend on the length that their sequence reaches later. For the same reason,
    sequences cannot be longer than max_position_embeddings, up to which "dynamic" has no effect.
    """
    exponents = torch.arange(0, rotary, 2, dtype=torch.int64).float() / rotary
    frequencies = 1.0 / (config.theta**exponents)
    if config.rope_type == "linear":
        return frequencies / config.factor
    if config.rope_type == "llama3":
        return _llama3(frequencies, config)
    if config.rope_type == "yarn":
        return _yarn(frequencies, config, rotary)
    if config.rope_type == "longrope":
        fits = max_positions <= config.original_max_position
        return frequencies / torch.tensor(config.short_factors if fits else config.long_factors)
    return frequencies


def _llama3(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Return Llama 3.1's frequencies: low ones are divided by `factor`, high ones are unchanged, those between are
    blended."""
    wavelengths = 2 * torch.pi / frequencies
    turns = config.original_max_position / wavelengths
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / config.factor + blend * frequencies


def _yarn(frequencies: torch.Tensor, config: RopeConfig, rotary: int) -> torch.Tensor:
    """Return YaRN's frequencies: those with few turns in the original context are divided by `factor`, those with many
    are unchanged, those between are blended."""

    def dimension(turns: float) -> float:
        """Return the dimension whose frequency makes `turns` turns in the original context."""
        positions_per_radian = min(config.original_max_position / (turns * 2 * pi), sys.float_info.max)
        return rotary * log(positions_per_radian) / (2 * log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    blend = (torch.arange(rotary // 2).float() - low) / (high - low or 0.001)
    blend = blend.clamp(0.0, 1.0)
    return frequencies / config.factor * blend + frequencies * (1 - blend)
