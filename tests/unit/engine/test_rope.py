"""Frequencies of rotary position embeddings at the limits of their parameters."""

from __future__ import annotations

import torch

from inference_worker.checkpoints.model_config import RopeConfig
from inference_worker.engine.architectures.rope import inverse_frequencies


def test_yarn_with_the_smallest_beta_fast() -> None:
    """Its dimension is the logarithm of a number beyond the largest float."""
    scaled = inverse_frequencies(RopeConfig(rope_type="yarn", factor=4.0, beta_fast=5e-324), 16, 8192)
    torch.testing.assert_close(scaled, inverse_frequencies(RopeConfig(), 16, 8192) / 4, rtol=0.02, atol=0)


def test_the_models_limit_chooses_the_factors_of_longrope() -> None:
    config = RopeConfig(
        rope_type="longrope", original_max_position=4096, short_factors=(1.0,) * 8, long_factors=(2.0,) * 8
    )
    default = inverse_frequencies(RopeConfig(), 16, 8192)
    assert torch.equal(inverse_frequencies(config, 16, 4096), default)
    assert torch.equal(inverse_frequencies(config, 16, 4097), default / 2)
