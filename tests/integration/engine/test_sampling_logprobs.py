"""Log-probabilities are the model's, with any parameters and however the prompt was computed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import Request, RequestOutput, SamplingParams, ServiceClass, TokenLogprobs
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.sampling.logprobs import prompt_logprobs, rank_tokens
from inference_worker.engine.sampling.sampler import Sampler
from inference_worker.engine.sequences.sequence import Sequence
from inference_worker.engine.sequences.step import ScheduledSequence
from tests.support.engine.fakes import run, tokens_of
from tests.support.engine.golden import read_golden

# Takes seconds on an idle machine, and many times longer on shared cores.
on_the_model = pytest.mark.timeout(600)

Logits = Callable[[list[int]], torch.Tensor]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_the_log_softmax(dtype: torch.dtype) -> None:
    logits = (torch.randn(40, 20_000) * 3).to(dtype)
    tokens, counts = torch.randint(20_000, (40,)), [row % 21 for row in range(40)]
    wanted = torch.log_softmax(logits.float(), -1)
    found = rank_tokens(logits, tokens, counts).read()
    assert [entry.token_id for entry in found] == tokens.tolist()
    for row, (entry, count) in enumerate(zip(found, counts, strict=True)):
        assert entry.logprob == pytest.approx(float(wanted[row, entry.token_id]), abs=1e-5)
        assert entry.rank == 1 + int((wanted[row] > wanted[row, entry.token_id]).sum())
        best = wanted[row].topk(count)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        # Any of equal tokens can be listed.
        assert [float(wanted[row, token]) for token, _ in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert len({token for token, _ in entry.top}) == count


def test_ties_have_the_best_rank() -> None:
    logits = torch.tensor([[2.0, 1.0, 2.0, 1.0]]).expand(4, -1)
    assert [entry.rank for entry in rank_tokens(logits, torch.arange(4), [0] * 4).read()] == [1, 3, 1, 3]


def test_a_number_above_the_vocabulary_returns_all_tokens() -> None:
    [entry] = rank_tokens(torch.randn(1, 5), torch.tensor([3]), [20]).read()
    assert len(entry.top) == 5


def test_only_requests_with_logprobs_receive_them() -> None:
    seqs = [Sequence(Request("x", [1], SamplingParams(temperature=0, logprobs=n)), None) for n in (None, 2, None, 0)]
    logits = torch.randn(4, 50)
    tokens, logprobs = Sampler(()).sample(logits, seqs, [1] * 4).read()
    assert tokens == logits.argmax(-1).tolist()
    assert {place: (entry.token_id, len(entry.top)) for place, entry in logprobs.items()} == {
        1: (tokens[1], 2),
        3: (tokens[3], 0),
    }


def scheduled(prompt: list[int], start: int, count: int, **params: Any) -> ScheduledSequence:
    return ScheduledSequence(Sequence(Request("x", prompt, SamplingParams(**params)), None), start, count, False, 0)


def test_prompt_logprobs_are_computed_in_small_groups_of_rows() -> None:
    vocab, chunk = 49_152, 600
    head, seen = torch.randn(4, vocab), []

    def logits_of(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return hidden @ head

    hidden = torch.randn(chunk + 20, 4)
    prompt = torch.randint(vocab, (800,)).tolist()
    batch = [scheduled([1] * 50, 0, 20), scheduled(prompt, 100, chunk, prompt_logprobs=1)]
    found = prompt_logprobs(batch, hidden, logits_of, vocab)
    assert list(found) == [1]
    assert max(seen) * vocab * 4 <= 32 << 20  # bytes, of 113 MiB
    wanted = (hidden[20:] @ head).log_softmax(-1)
    entries = found[1].read()
    assert [entry.token_id for entry in entries] == prompt[101 : 101 + chunk]
    logprobs = wanted.gather(-1, torch.tensor(prompt[101 : 101 + chunk])[:, None])[:, 0].tolist()
    assert [entry.logprob for entry in entries] == pytest.approx(logprobs, abs=1e-4)


def test_prompt_logprobs_are_complete_before_the_first_output_token() -> None:
    entry = scheduled([1, 2, 3], 0, 3, prompt_logprobs=0)
    hidden = torch.randn(3, 4)
    assert len(prompt_logprobs([entry], hidden, lambda rows: rows, 4)[0].read()) == 2
    entry.seq.tokens.append(3)
    assert prompt_logprobs([entry], hidden, lambda rows: rows, 4) == {}


def test_only_the_first_choice_computes_prompt_logprobs() -> None:
    entry = scheduled([1, 2, 3], 0, 3, prompt_logprobs=0)
    entry.seq.index = 1
    assert prompt_logprobs([entry], torch.randn(3, 4), lambda rows: rows, 4) == {}


@pytest.fixture(scope="module")
def checkpoint(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights and the embedded model's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("model")
    for path in model_dir.glob("tokenizer*"):
        shutil.copy(path, directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=None, eos_token_id=2, initializer_range=0.2,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def transformer(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def reference(transformer: Any) -> Logits:
    """Return the log-probabilities of transformers in float32. Row i is for the token after token i."""

    def logprobs(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            scores: torch.Tensor = transformer(torch.tensor([tokens])).logits[0].log_softmax(-1)
            return scores

    return logprobs


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Three short prompts and a longer one."""
    by_length = sorted((entry.prompt_token_ids for entry in read_golden()), key=len)
    return [*by_length[:3], next(prompt for prompt in by_length if len(prompt) > 120)]


def engine(model_dir: Path, **settings: object) -> LLMEngine:
    defaults = {"dtype": "float32", "attention": "reference", "block_size": 16, "num_blocks": 100, "device": "cpu"}
    given = {"measure_peaks": False, **defaults, **settings}
    return LLMEngine(EngineConfig(model_dir, **given))  # type: ignore[arg-type]


def assert_logprobs(found: list[TokenLogprobs], tokens: list[int], wanted: torch.Tensor, count: int) -> None:
    """`found` are of `tokens`, whose log-probabilities are the rows of `wanted`."""
    assert [entry.token_id for entry in found] == tokens
    for entry, row in zip(found, wanted[: len(tokens)], strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)
        assert (
            abs(entry.rank - 1 - int((row > row[entry.token_id]).sum())) <= 2
        )  # rounding may change the order of close values


def assert_all(outputs: list[RequestOutput], prompt: list[int], reference: Logits, count: int) -> None:
    tokens = tokens_of(outputs)
    wanted = reference(prompt + tokens)
    assert_logprobs([e for o in outputs for e in o.logprobs], tokens, wanted[len(prompt) - 1 : -1], count)
    [found] = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
    assert_logprobs(found, prompt[1:], wanted, count)


@on_the_model
def test_log_probabilities_equal_transformers_in_a_batch_with_chunks(
    checkpoint: Path, prompts: list[list[int]], reference: Logits
) -> None:
    # Sampling parameters do not change log-probabilities.
    kinds = [
        SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3, prompt_logprobs=3),
        SamplingParams(max_tokens=6, temperature=1.7, seed=1, ignore_eos=True, logprobs=3, prompt_logprobs=3),
        SamplingParams(max_tokens=6, temperature=0, repetition_penalty=1.5, presence_penalty=1, ignore_eos=True,
                       logprobs=3, prompt_logprobs=3),
        SamplingParams(max_tokens=6, temperature=0, logit_bias=((5, 50.0),), ignore_eos=True,
                       logprobs=3, prompt_logprobs=3),
    ]  # fmt: skip
    llm = engine(checkpoint, max_num_batched_tokens=64)
    # Cached tokens are computed anyway, for their logits.
    for name in ("first", "again"):
        for i, (prompt, params) in enumerate(zip(prompts, kinds, strict=True)):
            llm.add_request(Request(f"{name}{i}", prompt, params))
        outputs = run(llm)
        for i, prompt in enumerate(prompts):
            assert_all(outputs[f"{name}{i}"], prompt, reference, 3)


@on_the_model
def test_a_prompt_computed_again_after_a_preemption_returns_each_logprob_once(
    checkpoint: Path, prompts: list[list[int]], reference: Logits
) -> None:
    prompt, params = prompts[3], SamplingParams(max_tokens=4, temperature=0, logprobs=0, prompt_logprobs=1)
    for steps in (1, 3, 5):  # preempted in its first chunk, in a later one, and during its output
        llm = engine(checkpoint, num_blocks=12, max_num_batched_tokens=48, max_num_seqs=8)
        llm.add_request(Request("x", prompt[:130], params, service_class=ServiceClass.FLEX))
        seen = [output for _ in range(steps) for output in llm.step()]
        urgent = SamplingParams(max_tokens=2, temperature=0)
        llm.add_request(Request("urgent", [9] * 100, urgent, service_class=ServiceClass.PRIORITY))
        outputs = seen + run(llm)["x"]
        assert llm.stats().preemptions > 0
        tokens = tokens_of(outputs)
        wanted = reference(prompt[:130] + tokens)
        [found] = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
        assert_logprobs(found, prompt[1:130], wanted, 1)
        assert [e.token_id for o in outputs for e in o.logprobs] == tokens


@on_the_model
def test_greedy_output_with_a_repetition_penalty_equals_transformers(
    checkpoint: Path, prompts: list[list[int]], transformer: Any
) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, repetition_penalty=1.3)
    llm = engine(checkpoint, max_num_batched_tokens=64)
    for i, prompt in enumerate(prompts):
        llm.add_request(Request(str(i), prompt, params))
    outputs = run(llm)
    for i, prompt in enumerate(prompts):
        wanted = transformer.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=12, repetition_penalty=1.3, use_cache=True
        )
        assert tokens_of(outputs[str(i)]) == wanted[0, len(prompt) :].tolist()


@on_the_model
def test_min_tokens_prevents_an_early_end(checkpoint: Path) -> None:
    llm = engine(checkpoint)
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    eos = set(llm.tokenizer.eos_token_ids)
    likely = tuple((token, 50.0) for token in eos)
    for name, least in (("short", 0), ("long", 20)):
        params = SamplingParams(max_tokens=40, temperature=0, min_tokens=least, logit_bias=likely)
        llm.add_request(Request(name, prompt, params))
    outputs = run(llm)
    assert len(outputs["short"]) < 20
    assert not eos & set(tokens_of(outputs["long"])[:20])
    assert len(tokens_of(outputs["long"])) > 20
