"""A draft model beside a model: equal outputs, and drafts only where they save time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference_worker.checkpoints.model_config import ModelError
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import Request, SamplingParams
from inference_worker.engine.engine import LLMEngine
from tests.support.engine.fakes import run, tokens_of
from tests.support.engine.tiny_qwen3 import write_qwen3

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "seed": 5, "top_p": 0.95},
    "penalties": {"temperature": 0.9, "seed": 6, "frequency_penalty": 0.5},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("models") / "model")


def engine(model_dir: Path, draft_dir: Path | None, **changes: Any) -> LLMEngine:
    # In the batch-invariant mode, log-probabilities are equal bit for bit.
    config = EngineConfig(
        model_dir, device="cpu", dtype="float32", threads=1, measure_peaks=False, max_model_len=256, block_size=16,
        max_num_seqs=8, max_num_batched_tokens=64, kv_cache_memory=1 << 20, batch_invariant=True, speculation=True,
        draft_model_dir=draft_dir,
    )  # fmt: skip
    return LLMEngine(replace(config, **changes), drafters=(), timer=lambda: 0.0)


def outputs(llm: LLMEngine, *names: str) -> dict[str, Any]:
    """Run the requests of these names, or all, and return the tokens and log-probabilities of each."""
    prompt = [(7 * i) % 250 for i in range(50)]
    for name in names or CASES:
        sampling = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1, **CASES[name])
        llm.add_request(Request(name, prompt, sampling))
    found = run(llm)
    return {name: (tokens_of(each), [entry for o in each for entry in o.logprobs]) for name, each in found.items()}


def test_the_same_weights_are_accepted_and_other_weights_end_drafts(model_dir: Path, tmp_path: Path) -> None:
    expected = outputs(engine(model_dir, None))
    same = engine(model_dir, model_dir)
    assert same.speculator is not None
    draft_model = same.speculator.draft_model
    assert draft_model is not None
    draft_model.cost_ratio = 0.1  # as of a smaller model
    counts = same.speculator.counts
    assert outputs(same, "greedy", "sampled") == {name: expected[name] for name in ("greedy", "sampled")}
    assert counts.accepted["model"] == counts.verified["model"] > 50
    # With penalties the model samples from another distribution than the draft model.
    assert outputs(same, "penalties") == {"penalties": expected["penalties"]}
    assert counts.accepted["model"] < counts.verified["model"]
    other = engine(model_dir, write_qwen3(tmp_path / "other", hidden=32))
    assert outputs(other) == expected
    assert other.speculator is not None
    counts = other.speculator.counts
    before = counts.verified["model"]
    assert counts.accepted["model"] < 0.3 * before
    outputs(other)
    assert counts.verified["model"] - before <= 16  # only trials


def test_both_caches_fit_into_the_configured_memory(model_dir: Path) -> None:
    plain, both = engine(model_dir, None, batch_invariant=False), engine(model_dir, model_dir, batch_invariant=False)
    assert both.speculator is not None
    draft_model = both.speculator.draft_model
    assert draft_model is not None
    blocks = both.stats().kv_blocks + draft_model.cache.pool.num_blocks
    assert plain.stats().kv_blocks - 1 <= blocks <= plain.stats().kv_blocks
    assert abs(both.stats().kv_blocks - draft_model.cache.pool.num_blocks) <= 1


def test_the_draft_model_can_be_the_quantized_model(model_dir: Path) -> None:
    llm = engine(model_dir, model_dir, dtype="bfloat16", draft_quantization="int8")
    assert llm.speculator is not None
    draft_model = llm.speculator.draft_model
    assert draft_model is not None
    assert draft_model.cost_ratio < 0.7
    assert outputs(llm) == outputs(engine(model_dir, None, dtype="bfloat16"))
    assert llm.speculator.counts.accepted["model"] > 10


def test_another_vocabulary_is_refused(model_dir: Path, tmp_path: Path) -> None:
    other = write_qwen3(tmp_path / "other")
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    data = json.loads(text)
    data["added_tokens"][-1]["content"] = "<another>"
    (other / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ModelError, match=r"the vocabulary is not that of the model .* same tokenizer"):
        engine(model_dir, other)
    assert engine(model_dir, other, speculation=False).speculator is None
