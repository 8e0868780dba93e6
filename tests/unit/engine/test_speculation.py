"""Drafts, the choice of their number, and the accounts of accepted and rejected drafts."""

from __future__ import annotations

from collections.abc import Sequence as Items

import pytest

from inference_worker.contract.request import Request, RequestRejected, SamplingParams
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.sequences.sequence import Sequence
from inference_worker.engine.speculation.drafter import MAX_DEPTH
from inference_worker.engine.speculation.prompt_lookup import PromptLookup
from inference_worker.engine.speculation.speculator import MAX_STEP_TOKENS, DraftLimit, Speculator
from inference_worker.engine.speculation.step_costs import StepCosts
from tests.support.engine.fakes import GuessingDrafter, MemoryRunner, fake_engine, request, run, tokens_of


def sequence(prompt: list[int], output: Items[int] = (), prediction: tuple[int, ...] = ()) -> Sequence:
    seq = Sequence(Request("r", prompt, SamplingParams(max_tokens=100), prediction=prediction), None)
    seq.tokens += output
    seq.speculates = True
    return seq


def lookup(seq: Sequence, limit: int = 4, drafts: Items[int] = ()) -> list[int]:
    return [draft.token_id for draft in PromptLookup().propose(seq, drafts, limit)]


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 9], [1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 7, 2, 3, 8, 9], [1, 2, 3], [7, 2, 3, 8]),  # the longest match
        ([1, 2, 3, 7, 1, 2, 8, 9], [1, 2], [8, 9, 1, 2]),  # of equal matches the latest
        ([5, 6, 7], [8, 9, 8, 9], [8, 9, 8, 9]),  # a repetition continues with its own drafts
        ([1, 2, 3, 4], [9, 2], []),  # one equal token is no match
        ([1, 2, 3, 4], [5, 6], []),
        ([4], [], []),
    ],
)
def test_a_lookup_continues_the_longest_match(prompt: list[int], output: list[int], expected: list[int]) -> None:
    assert lookup(sequence(prompt, output)) == expected


def test_a_lookup_includes_earlier_drafts() -> None:
    assert lookup(sequence([1, 2, 3, 4, 5], [9]), drafts=[1, 2]) == [3, 4, 5, 9]


def test_a_predicted_output_is_followed_until_it_differs_and_found_again() -> None:
    drafter, seq = PromptLookup(), sequence([1, 2], prediction=(11, 12, 13, 14, 15, 16))

    def propose() -> list[int]:
        return [draft.token_id for draft in drafter.propose(seq, (), 3)]

    assert propose() == [11, 12, 13]
    seq.tokens += [11, 12]
    assert propose() == [13, 14, 15]
    seq.tokens.append(50)
    assert propose() == []
    seq.tokens += [14, 15]
    assert propose() == [16]  # the prediction ends; its end is not followed by the prompt


def plan(speculator: Speculator, seqs: list[Sequence], num_tokens: int | None = None) -> list[int]:
    limits = [DraftLimit(seq, MAX_DEPTH) for seq in seqs]
    return [len(drafts) for drafts in speculator.plan(limits, len(seqs), num_tokens or len(seqs))]


def test_the_depth_follows_the_acceptance() -> None:
    speculator = Speculator([GuessingDrafter([True])], ())
    right, wrong = sequence([1, 2, 3]), sequence([1, 2, 3])
    for _ in range(30):
        drafts, _ = speculator.plan([DraftLimit(right, 8), DraftLimit(wrong, 8)], 2, 2)
        assert speculator.record(right, len(drafts), [*drafts, 999]) == len(drafts)
        speculator.record(wrong, 0, [998])  # its drafts are wrong, which is measured without verification
    depths = plan(speculator, [right, wrong])
    assert depths[0] >= 6
    assert depths[1] == 0
    assert speculator.counts.accepted == speculator.counts.verified
    for _ in range(30):
        plan(speculator, [wrong])
        speculator.record(wrong, 0, [100])
    assert plan(speculator, [wrong]) != [0]  # it recovers, also without verification


def test_the_depth_is_zero_where_verification_costs_more_than_it_saves() -> None:
    speculator, seq = Speculator([GuessingDrafter([True])], ()), sequence([1, 2, 3])
    for num_tokens in [*range(1, 65)] * 3:
        speculator.costs.observe(num_tokens, 1.0 * num_tokens)  # a device without any spare capacity
    assert plan(speculator, [seq]) == [0]
    cheap = Speculator([GuessingDrafter([True])], ())
    for num_tokens in [*range(1, 65)] * 3:
        cheap.costs.observe(num_tokens, 8.0 + max(0, num_tokens - 8) * 1.5)
    assert plan(cheap, [seq]) == [7]  # the first eight tokens cost as much as one
    assert sum(plan(cheap, [sequence([1, 2, 3]) for _ in range(32)])) == 0
    assert plan(cheap, [seq], MAX_STEP_TOKENS) == [0]


def test_a_disturbed_measurement_does_not_end_speculation() -> None:
    speculator, seq = Speculator([GuessingDrafter([True])], ()), sequence([1, 2, 3])
    costs = speculator.costs
    for _ in range(20):
        costs.observe(1, 1.0)
    costs.observe(9, 30.0)
    costs.observe(9, 30.0)
    assert plan(speculator, [seq]) != [0]  # two slow steps say nothing of their size
    costs.observe(9, 30.0)
    costs.observe(2, 2.0)
    costs.observe(2, 2.0)
    costs.observe(2, 2.0)
    assert plan(speculator, [seq]) == [0]
    for _ in range(501):
        costs.observe(1, 1.0)
    assert plan(speculator, [seq]) != [0]  # tried again


def test_slow_steps_of_different_sizes_are_counted_together() -> None:
    speculator = Speculator([GuessingDrafter([True])], ())
    seqs = [sequence([1, 2, 3]) for _ in range(4)]
    for _ in range(20):
        speculator.costs.observe(4, 1.0)
    assert sum(plan(speculator, seqs)) > 0
    assert sum(plan(speculator, [*seqs, sequence([1, 2, 3])])) == 0  # more than MAX_STEP_SAMPLES
    for size in (5, 7, 10, 36):
        speculator.costs.observe(size, 9.0)
    assert sum(plan(speculator, seqs)) == 0


def test_fewer_tokens_do_not_cost_more() -> None:
    costs = StepCosts()
    for _ in range(3):
        costs.observe(1, 1.0)
        costs.observe(5, 30.0)
        costs.observe(9, 1.5)
    assert costs.estimate(5) == costs.estimate(9) == 1.5
    assert 1.0 < costs.estimate(3) < 1.5
    assert costs.estimate(20) > 1.5


def speculative(guesses: list[bool], **settings: float) -> tuple[LLMEngine, MemoryRunner]:
    runner = MemoryRunner(40, 4)
    engine, _ = fake_engine(runner=runner, block_size=4, drafters=[GuessingDrafter(guesses)], **settings)
    return engine, runner


def test_drafts_shorten_a_request_and_change_neither_tokens_nor_usage() -> None:
    engine, runner = speculative([True, True, False])
    plain, _ = fake_engine(runner=MemoryRunner(40, 4), block_size=4)
    for e in (engine, plain):
        e.add_request(request("r", 10, max_tokens=50))
    outputs, expected = run(engine)["r"], run(plain)["r"]
    assert not runner.errors
    assert tokens_of(outputs) == tokens_of(expected)
    assert outputs[-1].usage is not None
    assert outputs[-1].usage == expected[-1].usage
    assert len(runner.steps) < 40
    speculator = engine.speculator
    assert speculator is not None
    assert len(runner.steps) + speculator.counts.accepted["guesses"] == 50
    assert outputs[-1].accepted_drafts == speculator.counts.accepted["guesses"]
    assert (
        outputs[-1].rejected_drafts == speculator.counts.verified["guesses"] - speculator.counts.accepted["guesses"] > 0
    )
    assert engine.scheduler.tenants[""].served == plain.scheduler.tenants[""].served


@pytest.mark.parametrize("stop", range(106, 111))
def test_accepted_drafts_after_the_end_are_neither_counted_charged_nor_cached(stop: int) -> None:
    engine, _ = speculative([True])
    plain, _ = fake_engine(runner=MemoryRunner(40, 4), block_size=4)
    for e in (engine, plain):
        e.add_request(Request("r", [5, 6, 7], SamplingParams(max_tokens=40, stop_token_ids=(stop,))))
    outputs = engine.step()
    [seq] = engine.scheduler.running
    outputs += run(engine)["r"]
    assert tokens_of(outputs) == tokens_of(run(plain)["r"]) == [*range(100, stop + 1)]
    last = outputs[-1]
    assert last.accepted_drafts == len(tokens_of(outputs)) - 1  # the first token was no draft
    assert engine.speculator is not None
    assert last.accepted_drafts + last.rejected_drafts == engine.speculator.counts.verified["guesses"] > 0
    assert engine.scheduler.tenants[""].served == plain.scheduler.tenants[""].served
    assert len(seq.block_hashes) <= len(seq.tokens) // 4  # no block of dropped tokens
    engine.check_integrity()


def test_a_prediction_with_an_unknown_token_is_rejected() -> None:
    engine, _ = speculative([True])
    for prediction in ((1000,), (5, -1)):
        with pytest.raises(RequestRejected, match=r"prediction.*from 0 to 999"):
            engine.add_request(Request("r", [5], SamplingParams(max_tokens=4), prediction=prediction))
    engine.add_request(Request("r", [5], SamplingParams(max_tokens=4), prediction=(999,)))
    assert len(tokens_of(run(engine)["r"])) == 4


def test_a_request_without_speculation_gets_no_drafts() -> None:
    engine, runner = speculative([True])
    engine.add_request(Request("r", [5, 6, 7], SamplingParams(max_tokens=20), speculates=False))
    run(engine)
    assert len(runner.steps) == 20


def test_drafts_use_only_the_tokens_that_others_leave() -> None:
    engine, runner = speculative([True], max_num_batched_tokens=6, max_num_seqs=4)
    engine.add_request(request("first", 3, max_tokens=40))
    for _ in range(3):
        engine.step()
    engine.add_request(request("long", 30, max_tokens=5))
    for _ in range(5):
        engine.step()
        assert runner.steps[-1] == {"first": 1, "long": 5}  # no room for drafts
    run(engine)
    assert not runner.errors
    assert max(sum(step.values()) for step in runner.steps) <= 6


def test_drafts_take_no_block_that_a_running_request_needs_next() -> None:
    engine, runner = speculative([True], max_num_batched_tokens=64)
    for index in range(3):
        engine.add_request(request(f"r{index}", [50 + index] * 20, max_tokens=24))
    run(engine)
    assert not runner.errors
    assert engine.stats().preemptions == 0
    assert engine.stats().kv_blocks_used == 0


def test_blocks_of_accepted_drafts_are_cached() -> None:
    engine, _ = speculative([True])
    engine.add_request(request("r", 8, max_tokens=33))
    tokens = tokens_of(run(engine)["r"])
    engine.add_request(request("next", [10 + i for i in range(8)] + tokens, max_tokens=1))
    [output] = run(engine)["next"]
    assert output.cached_tokens == 40
