"""Sampling parameters in random batches: each row's token equals that of the simple reference."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from inference_worker.contract.request import Request, SamplingParams
from inference_worker.engine.sampling import penalties
from inference_worker.engine.sampling import sampler as sampler_module
from inference_worker.engine.sampling.sampler import Sampler
from inference_worker.engine.sequences.sequence import Sequence as EngineSequence
from inference_worker.engine.sequences.sequence import SequenceStatus
from tests.support.engine.sampling_reference import acceptable, edited

EOS = (1, 3)
GREEDY = SamplingParams(temperature=0)


def sequence(
    params: SamplingParams, prompt: Sequence[int], answer: Sequence[int] = (), seed: int = 7
) -> EngineSequence:
    seq = EngineSequence(Request("x", list(prompt), params), None)
    seq.tokens += answer
    seq.seed = seed
    return seq


def scores_of(logits: list[float], params: SamplingParams, prompt: list[int], answer: list[int]) -> list[float]:
    """Return the logits from which the sampler chooses."""
    seq, changed = sequence(params, prompt, answer), list[torch.Tensor]()

    def choose(scores: torch.Tensor, kernels: None) -> torch.Tensor:
        changed.append(scores)
        return torch.zeros(len(scores), dtype=torch.int64)

    with mock.patch.object(sampler_module, "_argmax", choose):
        Sampler(EOS).sample(torch.tensor([logits]), [seq], [seq.num_tokens])
    values: list[float] = changed[0][0].tolist()
    return values


def sample_all(
    sampler: Sampler, logits: torch.Tensor, made: list[tuple[SamplingParams, list[int], list[int], int]]
) -> list[int]:
    seqs = [sequence(*entry) for entry in made]
    return sampler.sample(logits, seqs, [seq.num_tokens for seq in seqs]).read()[0]


@st.composite
def rows(draw: st.DrawFn, vocab: int) -> tuple[SamplingParams, list[int], list[int], int]:
    tokens = st.integers(0, vocab - 1)
    some = draw(st.lists(tokens, max_size=6, unique=True))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 70, 600, 10 * vocab])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-6, 0.3, 0.9, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5, 2.0, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.3, -1.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.7, 5.0])),
        logit_bias=tuple((i, draw(st.sampled_from([-100.0, 100.0, 0.5, -3.0]))) for i in some),
        min_tokens=draw(st.integers(0, 4)),
        stop_token_ids=tuple(draw(st.lists(tokens, max_size=vocab if vocab < 9 else 9))),
        ignore_eos=draw(st.booleans()),
    )
    few = st.lists(tokens, max_size=8)
    return params, [draw(tokens), *draw(few)], draw(few), draw(st.integers(-(2**63), 2**63 - 1))


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[tuple[SamplingParams, list[int], list[int], int]]]:
    vocab = draw(st.sampled_from([4, 7, 65, 256, 700, 1024]))
    made = draw(st.lists(rows(vocab), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(len(made), vocab, generator=generator) * draw(st.sampled_from([0.1, 2.0, 8.0]))
    if draw(st.booleans()):
        logits = (logits * 4).round() / 4  # many equal values
    if draw(st.booleans()):
        logits[:, : vocab - 1 - draw(st.integers(0, 3))] = -math.inf  # all except a few are masked
    return logits.to(draw(st.sampled_from([torch.float32, torch.bfloat16]))), made


@settings(max_examples=150, deadline=None)
@given(batches())
def test_a_batchs_tokens_equal_the_references_row_by_row(
    batch: tuple[torch.Tensor, list[tuple[SamplingParams, list[int], list[int], int]]],
) -> None:
    logits, made = batch
    before = logits.clone()
    sampler = Sampler(EOS)
    chosen = sample_all(sampler, logits, made)
    assert torch.equal(logits, before)
    for own, token, (params, prompt, answer, seed) in zip(logits, chosen, made, strict=True):
        scores = edited(own.float().tolist(), params, prompt, answer, EOS)
        wanted = acceptable(scores, params, seed, len(prompt) + len(answer))
        assert token in wanted, (params, prompt, answer)
        assert sample_all(sampler, own[None], [(params, prompt, answer, seed)]) == [token]


@pytest.mark.parametrize("is_host", [True, False], ids=["host", "device"])
@settings(max_examples=100, deadline=None)
@given(st.integers(4, 60).flatmap(lambda vocab: st.tuples(st.just(vocab), rows(vocab))), st.integers(0, 2**32))
def test_edited_logits_equal_the_references(
    is_host: bool, case: tuple[int, tuple[SamplingParams, list[int], list[int], int]], seed: int
) -> None:
    vocab, (params, prompt, answer, _) = case
    params = replace(params, min_tokens=max(1, params.min_tokens), temperature=0.0)
    logits = (torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 5).tolist()
    with mock.patch.object(penalties, "is_host", lambda device: is_host):
        got = scores_of(logits, params, prompt, answer)
    assert got == pytest.approx(edited(logits, params, prompt, answer, EOS), rel=1e-5, abs=1e-5)


def test_presence_and_frequency_penalties_count_only_the_output() -> None:
    params = replace(GREEDY, presence_penalty=1.0, frequency_penalty=0.5)
    assert scores_of([5.0] * 5, params, [0, 0, 1], [1, 2, 2, 2]) == [5.0, 3.5, 2.5, 5.0, 5.0]


def test_repetition_penalties_count_the_prompt_too_and_each_token_once() -> None:
    params = replace(GREEDY, repetition_penalty=2.0)
    assert scores_of([4.0, -4.0, 4.0, -4.0], params, [0, 1, 0], [0, 1, 2, 2]) == [2.0, -8.0, 2.0, -4.0]


def test_a_bias_can_force_and_forbid() -> None:
    logits = torch.randn(2, 300)
    best = logits.argmax(-1).tolist()
    made = [(replace(GREEDY, logit_bias=bias), [0], [], 7) for bias in (((17, 100.0),), ((best[1], -100.0),))]
    assert sample_all(Sampler(EOS), logits, made) == [17, logits[1].topk(2).indices[1]]


def test_min_tokens_masks_ends_until_then() -> None:
    params = replace(GREEDY, min_tokens=2, stop_token_ids=(0,))
    kept = [[token for token, s in enumerate(scores_of([1.0] * 5, params, [2], [4] * n)) if s > -1] for n in range(3)]
    assert kept == [[2, 4], [2, 4], [0, 1, 2, 3, 4]]
    ignoring = replace(params, ignore_eos=True)
    assert [i for i, s in enumerate(scores_of([1.0] * 5, ignoring, [2], [])) if s > -1] == [1, 2, 3, 4]


def test_a_mask_takes_precedence_over_a_bias() -> None:
    params = replace(GREEDY, min_tokens=1, logit_bias=((1, 100.0),))
    assert scores_of([0.0] * 5, params, [0], [])[1] == torch.tensor(-1e30).item()


@pytest.mark.parametrize("params", [replace(GREEDY, frequency_penalty=1.0), replace(GREEDY, repetition_penalty=1.5)])
def test_a_sampler_updates_its_counts_with_the_output(params: SamplingParams) -> None:
    sampler, logits = Sampler(EOS), torch.randn(1, 40).abs()
    seq = sequence(params, [5, 6])
    for _ in range(80):
        scores = edited(logits[0].tolist(), params, [5, 6], seq.tokens[2:], EOS)
        [token], _ = sampler.sample(logits, [seq], [seq.num_tokens]).read()
        assert token in acceptable(scores, params, 0, 0)
        seq.tokens.append(token)


def test_an_end_token_outside_the_vocabulary_does_not_affect_other_rows() -> None:
    sampler, logits = Sampler((1, 45)), torch.zeros(2, 40)
    logits[1, 5] = 1  # 45 tokens after the start of the first row
    seqs = [sequence(replace(GREEDY, min_tokens=5), [7]), sequence(GREEDY, [7])]
    assert sampler.sample(logits, seqs, [1, 1]).read()[0] == [0, 5]


def test_a_bias_is_dropped_with_its_request() -> None:
    sampler = Sampler(EOS)
    seq = sequence(replace(GREEDY, logit_bias=((1, 1.0),)), [5])
    sampler.sample(torch.randn(1, 40), [seq], [1])
    assert len(sampler._edits) == 1
    del seq
    gc.collect()
    assert len(sampler._edits) == 0


def test_plain_requests_have_no_counts() -> None:
    sampler = Sampler(EOS)
    seq = sequence(SamplingParams(top_p=0.5, min_p=0.1, stop_token_ids=(7,)), [5])
    sampler.sample(torch.randn(1, 40), [seq], [1])
    assert len(sampler._edits) == 0
    assert sampler._penalties is None


PENALIZED = replace(GREEDY, frequency_penalty=1.0, repetition_penalty=1.2)


def test_a_sampled_token_is_counted_before_the_host_has_it() -> None:
    """A step that is launched early samples at a position whose previous token is not in the sequence yet."""
    sampler, logits = Sampler(EOS), torch.randn(1, 40).abs()
    seq = sequence(PENALIZED, [5, 6])
    early = [sampler.sample(logits, [seq], [2 + i]).read()[0][0] for i in range(30)]
    late, other = sequence(PENALIZED, [5, 6]), Sampler(EOS)
    for _ in range(30):
        late.tokens += other.sample(logits, [late], [late.num_tokens]).read()[0]
    assert early == late.tokens[2:]


def test_a_dropped_token_is_not_counted() -> None:
    """A preemption during a step may drop its token. The same position is then sampled again."""
    logits = torch.zeros(1, 40)
    logits[0, 5], logits[0, 6] = 1.0, 0.5
    sampler, seq = Sampler(EOS), sequence(PENALIZED, [7])
    assert sampler.sample(logits, [seq], [1]).read()[0] == [5]
    seq.epoch += 1
    assert sampler.sample(logits, [seq], [1]).read()[0] == [5]
    seq.tokens.append(5)
    seq.epoch += 1
    assert sampler.sample(logits, [seq], [2]).read()[0] == [6]


def test_the_rows_of_ended_requests_are_reused_without_their_counts() -> None:
    sampler, logits = Sampler(EOS), torch.randn(20, 40)
    for _ in range(5):
        made = [(PENALIZED, [token], [token + 1] * 3, 7) for token in range(20)]
        seqs = [sequence(*entry) for entry in made]
        got = sampler.sample(logits, seqs, [4] * 20).read()[0]
        assert got == sample_all(Sampler(EOS), logits, made)
        for seq in seqs:
            seq.status = SequenceStatus.FINISHED
    assert sampler._penalties is not None
    assert len(sampler._penalties._counts) == 32


def test_an_ended_request_is_sampled_without_its_row() -> None:
    sampler, seq = Sampler(EOS), sequence(PENALIZED, [7])
    seq.status = SequenceStatus.FINISHED
    sampler.sample(torch.randn(1, 40), [seq], [9])  # the tokens in between never arrived
    assert sampler._penalties is None


def test_long_histories() -> None:
    sampler, logits = Sampler(EOS), torch.randn(2, 3000)
    made = [(PENALIZED, list(range(n, n + 2000)), list(range(500)), 7) for n in (0, 900)]
    assert sample_all(sampler, logits, made) == sample_all(Sampler(EOS), logits, made)
    scores = edited(logits[1].tolist(), PENALIZED, made[1][1], made[1][2], EOS)
    assert scores_of(logits[1].tolist(), PENALIZED, made[1][1], made[1][2]) == pytest.approx(scores, abs=1e-5)
