"""The quality of quantization at load, on a part of the text of benchmarks/quality.py."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.quality import Quality, compare, exceeds, read_text
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.contract.settings import ModelSpec
from tests.support.models import models_data_dir


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


def test_a_result_outside_its_limits_is_found() -> None:
    assert exceeds(Quality("int8", 1, 1.0, 0.6, 100.0, 0.0))
    assert exceeds(Quality("int8", 1, 1.0, 0.4, 96.9, 0.0))
    assert not exceeds(Quality("int8", 1, 1.0, 0.4, 100.0, 0.0))
    assert not exceeds(Quality("int4-g128", 1, 1.0, 9.0, 100.0, 0.0))
