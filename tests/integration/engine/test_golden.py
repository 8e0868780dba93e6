"""The engine's greedy output of the embedded model equals transformers', however requests are batched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import Request, SamplingParams
from inference_worker.engine.engine import LLMEngine
from tests.support.engine.fakes import run, tokens_of
from tests.support.engine.golden import NEW_TOKENS, Golden, first_difference, read_golden, read_prompts, recompute

# Takes seconds on an idle machine, and many times longer on shared cores.
pytestmark = pytest.mark.timeout(600)

GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
FEWER = GREEDY.replace(max_tokens=16)  # all 48 tokens of all 200 outputs: -m slow


@pytest.fixture(scope="module")
def golden() -> list[Golden]:
    return read_golden()


@pytest.fixture(scope="module")
def short(golden: list[Golden]) -> list[Golden]:
    """The 40 shortest prompts, with the first tokens of their outputs."""
    shortest = sorted(golden, key=lambda g: len(g.prompt_token_ids))[:40]
    return [replace(entry, tokens=entry.tokens[: FEWER.max_tokens]) for entry in shortest]


def engine(model_dir: Path, **settings: object) -> LLMEngine:
    defaults = {"dtype": "float32", "attention": "reference", "block_size": 16, "num_blocks": 600, "device": "cpu"}
    given = {"measure_peaks": False, **defaults, **settings}
    return LLMEngine(EngineConfig(model_dir, **given))  # type: ignore[arg-type]


def answers(llm: LLMEngine, golden: Sequence[Golden], salt: bytes = b"") -> list[list[int]]:
    for entry in golden:
        params = GREEDY.replace(max_tokens=len(entry.tokens))
        llm.add_request(Request(entry.id, entry.prompt_token_ids, params, salt))
    outputs = run(llm)
    return [tokens_of(outputs[entry.id]) for entry in golden]


def assert_equal(golden: Sequence[Golden], got: Sequence[list[int]]) -> None:
    wrong = {
        g.id: place for g, tokens in zip(golden, got, strict=True) if (place := first_difference(g, tokens)) is not None
    }
    assert not wrong


def test_the_golden_file_has_these_prompts(golden: list[Golden]) -> None:
    assert [entry.id for entry in golden] == [prompt["id"] for prompt in read_prompts()]
    assert len({entry.id for entry in golden}) == 200
    assert {len(entry.tokens) for entry in golden} == {NEW_TOKENS}
    # Near ties allow differences, so there must be few of them.
    assert sum(len(entry.near_ties) for entry in golden) < 20


def test_the_golden_outputs_are_current(golden: list[Golden], model_dir: Path) -> None:
    # One pass over prompt and output: if each token is the best after those before it, it is the greedy output.
    chosen = {entry.id: entry for entry in golden[::40]}
    prompts = [prompt for prompt in read_prompts() if prompt["id"] in chosen]
    assert len(prompts) == 5
    for entry, best in recompute(model_dir, prompts, chosen):
        assert first_difference(entry, best) is None


def test_single_requests_equal_transformers(short: list[Golden], model_dir: Path) -> None:
    llm = engine(model_dir, max_num_seqs=1)
    assert_equal(short[:4], [answers(llm, [entry], entry.id.encode())[0] for entry in short[:4]])


def test_a_batch_with_chunks_cache_hits_and_preemption_equals_transformers(
    short: list[Golden], model_dir: Path
) -> None:
    # The outputs that run together require more blocks than these. With whole outputs: -m slow.
    shortest = short[:16]
    llm = engine(model_dir, max_num_seqs=16, max_num_batched_tokens=48, num_blocks=30)
    assert_equal(shortest, answers(llm, shortest))
    stats = llm.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.batched_sequences > 5 * stats.steps
    # And once more, from the cache.
    assert_equal(shortest[:4], answers(llm, shortest[:4]))
    assert llm.stats().cached_tokens >= stats.cached_tokens + 4 * 16


def test_the_cpu_backend_equals_transformers(short: list[Golden], model_dir: Path) -> None:
    llm = engine(model_dir, max_num_seqs=32, max_num_batched_tokens=64, attention="cpu")
    assert_equal(short[:24], answers(llm, short[:24]))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 32, "max_num_batched_tokens": 100, "num_blocks": 150},
        {"max_num_seqs": 32, "max_num_batched_tokens": 512, "attention": "cpu"},
    ],
    ids=["alone", "batch of 32", "cpu backend"],
)
def test_all_200_outputs(settings: dict[str, object], golden: list[Golden], model_dir: Path) -> None:
    assert_equal(golden, answers(engine(model_dir, **settings), golden))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_200_outputs_in_bfloat16_are_close(golden: list[Golden], model_dir: Path) -> None:
    assert_near(golden, engine(model_dir, dtype="bfloat16", max_num_seqs=32, attention="auto"), model_dir)


def test_every_token_in_bfloat16_is_close_to_the_best(short: list[Golden], model_dir: Path) -> None:
    assert_near(short[:24], engine(model_dir, dtype="bfloat16", max_num_seqs=32, attention="auto"), model_dir)


def assert_near(golden: Sequence[Golden], llm: LLMEngine, model_dir: Path) -> None:
    """Check in float32, teacher-forced on our tokens, that each is within 0.5 of the best logit and 97% are best."""
    from transformers import AutoModelForCausalLM

    outputs = answers(llm, golden)
    del llm  # before the other model takes as much memory
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    missed = total = 0
    for entry, tokens in zip(golden, outputs, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([entry.prompt_token_ids + tokens])
            logits = model(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1]
        short_by = logits.max(-1).values - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        assert float(short_by.max()) <= 0.5, entry.id
        missed += int((short_by > 0).sum())
        total += len(tokens)
    assert missed <= math.floor(0.03 * total), f"{missed} of {total} tokens are not the best"


def test_a_seed_gives_the_same_text_with_and_without_other_requests(short: list[Golden], model_dir: Path) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=3)
    llm = engine(model_dir, attention="auto")

    def text(company: Sequence[Golden]) -> str:
        for entry in company:
            llm.add_request(Request(entry.id, entry.prompt_token_ids, FEWER))
        llm.add_request(Request("seeded", short[0].prompt_token_ids, params))
        return "".join(output.text for output in run(llm)["seeded"])

    alone = text([])
    assert len(alone) > 20
    assert text(short[1:6]) == alone


def test_a_stop_string_ends_the_text(model_dir: Path) -> None:
    llm = engine(model_dir, attention="auto")
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    llm.add_request(Request("a", prompt, SamplingParams(max_tokens=20, temperature=0)))
    llm.add_request(Request("b", prompt, SamplingParams(max_tokens=20, temperature=0, stop=("France is", "never"))))
    outputs = run(llm)
    texts = {name: "".join(output.text for output in outputs[name]) for name in "ab"}
    assert texts == {"a": "The capital of France is Paris.", "b": "The capital of "}
    ends = {name: (outputs[name][-1].finish_reason, outputs[name][-1].stop_reason) for name in "ab"}
    assert ends == {"a": ("stop", None), "b": ("stop", "France is")}
