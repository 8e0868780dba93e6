"""Speculative decoding is exact: outputs are those without it, token for token, greedy and sampled."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.speculation import check_equality
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import Request, SamplingParams, ServiceClass, StructuredSpec
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.sampling.sampler import Sampler
from inference_worker.engine.sequences.sequence import Sequence
from inference_worker.engine.structured_output.grammars import GrammarCompiler, fill_masks

VOCAB = 12
LIKELY, BIASED = 3, 5
SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 12},
        "status": {"enum": ["pending", "shipped", "shipped late"]},
        "quantity": {"type": "integer"},
    },
    "required": ["customer_name", "status", "quantity"],
    "additionalProperties": False,
}
FORMATS = [
    StructuredSpec("json_schema", json.dumps(SCHEMA)),
    StructuredSpec("regex", r"(Dear customer|Dear Sir or Madam), your order (was shipped|is late)[.!]"),
    StructuredSpec("grammar", 'start: "SELECT " ("name" | "number") " FROM orders" (" WHERE number = " /[0-9]{1,3}/)?'),
    StructuredSpec("json_object"),
]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.8, "top_p": 0.95, "min_p": 0.01},
        {"temperature": 1.2, "top_k": 6, "logit_bias": ((BIASED, 1.5),), "min_tokens": 3},
        {"temperature": 0.9, "repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    ],
    ids=["top_p", "top_k", "penalties"],
)
@pytest.mark.parametrize("draws", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_verified_tokens_have_the_distribution_of_plain_sampling(params: dict[str, Any], draws: int) -> None:
    rows = 1_000
    logits = torch.tensor(np.random.default_rng(1).normal(size=(3, VOCAB)) * 1.5, dtype=torch.float32)
    logits[:2, LIKELY] = logits[:2].amax(-1) + 1.0
    drafts = (LIKELY, LIKELY)
    verified: Counter[tuple[int, ...]] = Counter()
    plain: Counter[tuple[int, ...]] = Counter()
    sampling = SamplingParams(max_tokens=10, **params)
    for start in range(0, draws, rows):
        seqs = [Sequence(Request("r", [1, 2], sampling), None) for _ in range(rows)]
        sampler = Sampler((0,))
        for index, seq in enumerate(seqs):
            seq.seed = start + index
        found = sampler.sample(logits.repeat(rows, 1), seqs, [2] * rows, [drafts] * rows)
        assert found.counts is not None
        tokens, _ = found.read()
        ends = np.cumsum(found.counts)
        for end, length in zip(ends.tolist(), found.counts, strict=True):
            verified[tuple(tokens[end - length : end])] += 1
        # Other seeds, and the rule of acceptance applied to tokens that were sampled one at a time.
        for index, seq in enumerate(seqs):
            seq.seed = 10_000_000 + start + index
        outputs: list[list[int]] = [[] for _ in seqs]
        active = list(range(rows))
        other = Sampler((0,))
        for depth in range(3):
            chosen = other.sample(
                logits[depth].repeat(len(active), 1), [seqs[i] for i in active], [2 + depth] * len(active)
            ).read()[0]
            for i, token in zip(active, chosen, strict=True):
                outputs[i].append(token)
                seqs[i].tokens.append(token)
            active = [i for i in active if depth < 2 and outputs[i][-1] == drafts[depth]]
        plain.update(map(tuple, outputs))
    assert 0.2 < sum(n for key, n in verified.items() if len(key) > 1) / draws < 0.98
    statistic, freedom = 0.0, -1
    rare = [0, 0]
    for key in verified.keys() | plain.keys():
        a, b = verified[key], plain[key]
        if a + b < 20:
            rare = [rare[0] + a, rare[1] + b]
            continue
        statistic, freedom = statistic + (a - b) ** 2 / (a + b), freedom + 1
    if sum(rare) >= 20:
        statistic, freedom = statistic + (rare[0] - rare[1]) ** 2 / sum(rare), freedom + 1
    # The seeds are fixed, so the result is too. 5 standard deviations above the mean of the chi-square distribution.
    assert freedom >= 10
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Any:
    compiler = GrammarCompiler(tokenizer, 49_152)
    yield compiler
    compiler.close()


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.constraint_type)
def test_only_tokens_without_an_alternative_are_forced(form: StructuredSpec, grammars: GrammarCompiler) -> None:
    draw, forced_count = random.Random(3), 0
    for _ in range(2):
        grammar = grammars.start("t", form)
        for _ in range(25):
            if grammar.complete:
                break
            mask = np.unpackbits(fill_masks([grammar])[0], bitorder="little")
            for token in grammar.forced_tokens():
                mask = np.unpackbits(fill_masks([grammar])[0], bitorder="little")
                assert np.flatnonzero(mask).tolist() == [token]
                grammar.accept(token)
                forced_count += 1
                mask = np.unpackbits(fill_masks([grammar])[0], bitorder="little")
            allowed = np.flatnonzero(mask).tolist()
            if grammar.complete or not allowed:
                break
            token = draw.choice(allowed)
            before = fill_masks([grammar])[0]
            grammar.pop(grammar.push([token]))
            assert np.array_equal(fill_masks([grammar])[0], before)  # drafts leave no trace
            grammar.accept(token)
    assert forced_count > 2 or form.constraint_type == "json_object"


class SlowMatcher:
    """A matcher whose look at the next forced tokens takes a second."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.now = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def compute_ff_tokens(self) -> Any:
        self.now += 1.0
        return self._matcher.compute_ff_tokens()


def test_a_grammar_that_is_slow_with_drafts_gets_none_and_does_not_fail(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = grammars.start("t", FORMATS[2])
    slow: Any = SlowMatcher(grammar.matcher)
    grammar.matcher = slow
    monkeypatch.setattr("inference_worker.engine.structured_output.grammars.time.thread_time", lambda: slow.now)
    forced = grammar.forced_tokens()
    assert forced
    for token in forced:
        assert grammar.forced_tokens() == []
        assert grammar.count_allowed([token]) == 0
        grammar.accept(token)
    assert slow.now == 1.0


def outputs_of(engine: LLMEngine, requests: Items[Request]) -> dict[tuple[str, int], list[Any]]:
    """Run the requests and return the tokens, text, log-probabilities and ends of all sequences. The last requests
    arrive later and preempt others."""
    found: dict[tuple[str, int], list[Any]] = {}
    for request in requests[:-3]:
        engine.add_request(replace(request, service_class=ServiceClass.FLEX))
    for step in count():
        if step == 8:
            for request in requests[-3:]:
                engine.add_request(request)
        if step > 8 and not engine.has_unfinished():
            break
        for output in engine.step():
            assert output.error is None
            tokens, text, logprobs, ends = found.setdefault((output.request_id, output.index), [[], [""], [], []])
            tokens += output.token_ids
            text[0] += output.text
            logprobs += output.logprobs
            ends += [output.finish_reason, output.stop_reason] if output.finished else []
        engine.check_integrity()
    return found


COPY = (
    "Copy this list. Order 4711: two bottles TH-220, 24.50 EUR each, one stove CS-100, 89.90 EUR. "
    "Order 4712: two bottles TH-220, 24.50 EUR each.\nOrder 4711: two bottles TH-220,"
)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "seed": 5, "n": 2},
    "penalties": {"temperature": 0.7, "seed": 6, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "stop": {"temperature": 0, "stop": ("stove",)},
    "bias": {"temperature": 0.6, "seed": 8, "top_p": 0.9, "min_p": 0.02, "logit_bias": ((260, 1.0),), "min_tokens": 8},
    "ids": {"temperature": 0, "ignore_eos": True, "stop_token_ids": (30,)},
}


@pytest.mark.timeout(400)  # two hundred steps of a model
def test_outputs_are_equal_with_chunked_prompts_prefix_hits_and_preemptions(
    model_dir: Path, tokenizer: Tokenizer
) -> None:
    config = EngineConfig(
        model_dir, device="cpu", measure_peaks=False, num_blocks=8, max_num_batched_tokens=48, max_num_seqs=4,
        speculation=True,
    )  # fmt: skip
    engine = LLMEngine(config)
    prompt = tokenizer.encode(COPY)
    requests = [Request(name, prompt, SamplingParams(max_tokens=20, **params)) for name, params in CASES.items()]
    long = [*prompt, *prompt[:60]]
    requests.append(Request("prediction", long, SamplingParams(max_tokens=40, temperature=0), prediction=tuple(prompt)))
    for name, form in (("json", FORMATS[0]), ("regex", FORMATS[1])):
        params = SamplingParams(max_tokens=32, temperature=0.8, seed=3, logprobs=0 if name == "regex" else None)
        requests.append(Request(name, prompt, params, structured=form))
    expected = outputs_of(engine, [replace(request, speculates=False) for request in requests])
    plain_steps = engine.stats().steps
    assert engine.speculator is not None
    assert not any(engine.speculator.counts.verified.values())
    found = outputs_of(engine, requests)
    assert found.keys() == expected.keys()
    for key, (tokens, text, logprobs, ends) in expected.items():
        assert found[key][0] == tokens, key
        assert found[key][1] == text, key
        assert found[key][3] == ends, key
        assert found[key][2] == logprobs, key  # bit for bit
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert engine.metrics.forced_tokens > 0
    assert engine.speculator.counts.accepted["lookup"] > 20
    assert stats.steps - plain_steps < 0.85 * plain_steps


@pytest.mark.slow
@pytest.mark.timeout(1200)  # twice 250 outputs
def test_greedy_outputs_of_200_real_prompts_are_equal(model_dir: Path) -> None:
    config = EngineConfig(
        model_dir, device="cpu", measure_peaks=False, max_num_batched_tokens=256, long_prefill_token_threshold=128
    )
    found = check_equality(config, 200, 48)
    assert found["outputs"] == 250
    assert found["preemptions"] > 0
    assert found["cached_tokens"] > 0
    assert found["accepted"] > 100
