"""The quality of dtypes, kernels and quantization at load, on a part of the text of benchmarks/quality.py."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from benchmarks.quality import Quality, compare, exceeds, read_text
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.contract.settings import ModelSpec
from kernels.native.build import runnable_variants
from tests.support.models import models_data_dir

# Mean divergence from float32, in thousandths of a nat. Rounding the inputs of products and the KV cache to bfloat16
# costs 0.2, and rounding the hidden states between blocks, too, 0.7.
MAX_DIVERGENCES = {"bfloat16": 0.4, "bfloat16-kv-int8": 1.5, "int8": 3.5, "int8-kv-int8": 4.5}
MAX_PYTORCH_DIVERGENCE = 1.0  # its attention and logits are also rounded; with the hidden states it would be 1.1


def test_quantization_hardly_changes_the_perplexity(model_dir: Path) -> None:
    names = ["bfloat16", "bfloat16-kv-int8", "int8", "int8-kv-int8", "int4", "gguf"]
    options = argparse.Namespace(
        tokens=500, context=256, configurations=",".join(names), device="cpu", threads=1, json=True, kernels="auto",
        kept=ensure_model(ModelSpec("m", "embedded", "auto", quantization="gguf"), models_data_dir()),
    )  # fmt: skip
    prompts = read_text(model_dir, options)
    assert [len(prompt) for prompt in prompts] == [256, 256]
    reference, *found = compare(model_dir, prompts, options)
    assert (reference.tokens, reference.change_percent, reference.agreement_percent) == (510, 0, 100)
    assert [row.configuration for row in found] == names
    for row in found:
        assert abs(row.change_percent) < 2, row
        assert row.agreement_percent > 93, row
        assert row.perplexity != reference.perplexity
        assert row.divergence < MAX_DIVERGENCES.get(row.configuration, math.inf), row


def test_the_default_dtype_hardly_changes_the_probabilities_with_any_kernels(model_dir: Path) -> None:
    options = argparse.Namespace(
        tokens=127, context=128, configurations="default", device="cpu", threads=1, json=True, kernels="all",
        kept=None,
    )  # fmt: skip
    reference, *found = compare(model_dir, read_text(model_dir, options), options)
    assert reference.divergence == 0
    assert [row.kernels for row in found] == [*runnable_variants(), "pytorch"]
    for row in found:
        limit = MAX_PYTORCH_DIVERGENCE if row.kernels == "pytorch" else MAX_DIVERGENCES["bfloat16"]
        assert row.divergence < limit, row


def test_a_result_outside_its_limits_is_found() -> None:
    def quality(name: str, change: float, agreement: float, divergence: float) -> Quality:
        return Quality("auto", name, 1, 1.0, change, agreement, divergence, 0.0)

    assert exceeds(quality("int8", 0.6, 100.0, 0.0))
    assert exceeds(quality("int8", 0.4, 96.9, 0.0))
    assert exceeds(quality("bfloat16", 0.0, 100.0, 9.0))
    assert not exceeds(quality("int8", 0.4, 100.0, 0.0))
    assert not exceeds(quality("int4-g128", 9.0, 100.0, 9.0))
