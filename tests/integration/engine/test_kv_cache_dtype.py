"""A KV cache in 8 bits: close to one in the dtype, and equal results with prefix hits, preemption and other batches."""

from __future__ import annotations

import random

import pytest
import torch

from inference_worker.contract.engine_config import KVCacheDTypeName
from inference_worker.engine.attention.base import BackendChoice
from tests.support.engine.families import CASES, VOCAB, FamilyModel, generate

_RANDOM = random.Random(0)
PROMPTS = {
    name: [_RANDOM.randrange(3, VOCAB) for _ in range(count)] for name, count in (("a", 70), ("b", 90), ("c", 110))
}
NEW = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> FamilyModel:
    return FamilyModel(CASES["qwen3"], tmp_path_factory.mktemp("qwen3"))  # its heads have 32 numbers


def test_the_kernels_give_equal_results_in_all_batches(model: FamilyModel) -> None:
    options = {"dtype": "bfloat16", "block_size": 32, "kv_cache_dtype": "int8", "max_num_batched_tokens": 24}
    engine = model.engine(num_blocks=9, **options)
    assert engine._runner.attention_choice == BackendChoice("native")
    together = generate(engine, PROMPTS, NEW, urgent=["a", "b"])
    assert engine.stats().preemptions > 0
    again = generate(engine, {"c": PROMPTS["c"]}, NEW)["c"]
    assert again.cached_tokens >= 64
    for name, prompt in PROMPTS.items():
        alone = generate(model.engine(num_blocks=9, prefix_cache=False, **options), {name: prompt}, NEW)[name]
        for got in (together[name], again) if name == "c" else (together[name],):
            assert got.tokens == alone.tokens
            assert all(torch.equal(row, alone.logits[at]) for at, row in got.logits.items())
    engine.check_integrity()


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "backend", "limit"),
    [
        ("int8", "bfloat16", BackendChoice("native"), 0.03),
        ("int8", "float32", BackendChoice("reference"), 0.02),
        ("fp8", "float32", BackendChoice("reference"), 0.08),
    ],
)
def test_results_are_close_to_those_of_the_dtype(
    kv_dtype: KVCacheDTypeName, dtype: str, backend: BackendChoice, limit: float, model: FamilyModel
) -> None:
    options = {"dtype": dtype, "block_size": 32, "num_blocks": 40}
    attention = "auto" if backend.name == "native" else backend.name
    engine = model.engine(kv_cache_dtype=kv_dtype, attention=attention, **options)
    assert engine._runner.attention_choice == backend
    found, wanted = generate(engine, PROMPTS, 1), generate(model.engine(**options), PROMPTS, 1)
    errors = []
    for name, prompt in PROMPTS.items():
        got, want = (each[name].logits[len(prompt)].float() for each in (found, wanted))
        errors.append(float((got - want).norm() / want.norm()))
    assert 0 < max(errors) < limit


def test_the_cache_has_more_blocks_in_the_same_memory(model: FamilyModel) -> None:
    options = {"dtype": "bfloat16", "block_size": 32, "num_blocks": None, "kv_cache_memory": 1 << 24}
    plain, small = (model.engine(kv_cache_dtype=name, **options)._runner for name in ("auto", "int8"))
    assert small.num_blocks == int(plain.num_blocks * 2 / 1.0625)
    assert small.roofline.kv_token_bytes == int(plain.roofline.kv_token_bytes * 1.0625 / 2)
