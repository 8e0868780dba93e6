"""A draft model: the tokens in its cache, its blocks, and the choice of when to use it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from inference_worker.contract.request import Request, SamplingParams
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.kv_cache.kv_cache import KVCacheManager
from inference_worker.engine.sequences.sequence import Sequence
from inference_worker.engine.sequences.step import SchedulerOutput
from inference_worker.engine.speculation.draft_model import DraftModel
from inference_worker.engine.speculation.drafter import DraftRequest
from inference_worker.engine.speculation.speculator import MAX_STEP_SAMPLES, DraftLimit, Speculator
from tests.support.engine.fakes import FakeStep, MemoryRunner, fake_engine, request, run, tokens_of

BLOCK = 4


class DraftRunner(MemoryRunner):
    """A runner of a draft model. Some of its tokens are wrong.

    Args:
        is_right: whether the draft of the token at a position is the token that the model samples.
    """

    def __init__(self, num_blocks: int, is_right: Callable[[int], bool] = lambda _: True) -> None:
        super().__init__(num_blocks, BLOCK)
        self._is_right = is_right
        self.fails = False

    def launch(self, output: SchedulerOutput) -> FakeStep:
        if self.fails:
            raise RuntimeError("out of memory")
        step = super().launch(output)
        positions = [s.start + s.num_new_tokens for s in output.scheduled if s.samples]

        def read() -> object:
            result = step.read()
            for tokens, position in zip(result.tokens, positions, strict=True):
                if not self._is_right(position):
                    tokens[0] = 7
            return result

        return FakeStep(read)  # type: ignore[arg-type]


def drafting(
    runner: DraftRunner, *, cost_ratio: float = 0.1, max_model_len: int = 4096, blocks: int = 60, **settings: float
) -> tuple[LLMEngine, MemoryRunner]:
    """Return an engine with the draft model, and its runner. No step takes time: the depth follows the acceptance."""
    own = MemoryRunner(blocks, BLOCK)
    model = draft_model(runner, cost_ratio=cost_ratio, max_model_len=max_model_len)
    engine, _ = fake_engine(runner=own, block_size=BLOCK, drafters=(), draft_model=model, speculation=True, **settings)
    return engine, own


def draft_model(runner: DraftRunner, *, cost_ratio: float = 0.1, max_model_len: int = 4096) -> DraftModel:
    cache = KVCacheManager(runner.num_blocks, BLOCK)
    return DraftModel(
        runner, cache, cost_ratio=cost_ratio, max_model_len=max_model_len, vocab_size=1000, timer=lambda: 0.0
    )


def draft_counts(engine: LLMEngine) -> tuple[int, int]:
    """Return the verified and the accepted drafts of the draft model."""
    assert engine.speculator is not None
    counts = engine.speculator.counts
    return counts.verified["model"], counts.accepted["model"]


def test_a_draft_model_that_equals_the_model_is_always_right() -> None:
    runner = DraftRunner(40)
    engine, own = drafting(runner)
    engine.add_request(request("r", 10, max_tokens=60))
    outputs = run(engine)["r"]
    assert tokens_of(outputs) == [*range(100, 160)]
    verified, accepted = draft_counts(engine)
    assert verified == accepted > 40
    assert len(own.steps) + accepted == 60
    assert not own.errors
    assert not runner.errors  # its blocks always contained the sequence's tokens
    assert outputs[-1].accepted_drafts == accepted


@pytest.mark.parametrize("period", [2, 3, 5])
def test_wrong_drafts_change_neither_the_output_nor_the_accounts(period: int) -> None:
    runner = DraftRunner(40, lambda position: position % period != 0)
    engine, own = drafting(runner)
    for index in range(3):
        engine.add_request(request(f"r{index}", [50 + index] * (9 + index), max_tokens=40))
    found = run(engine)
    assert all(tokens_of(outputs) == [*range(100, 140)] for outputs in found.values())
    verified, accepted = draft_counts(engine)
    assert verified > accepted > 0
    assert not own.errors
    assert not runner.errors
    assert runner_is_empty(engine)


def test_drafts_that_are_never_right_end() -> None:
    runner = DraftRunner(60, lambda _: False)
    engine, _ = drafting(runner, cost_ratio=0.4)
    engine.add_request(request("r", 8, max_tokens=200))
    outputs = run(engine)["r"]
    assert tokens_of(outputs) == [*range(100, 300)]
    steps = len(runner.steps)
    assert steps < 40
    engine.add_request(request("later", 8, max_tokens=200))
    assert tokens_of(run(engine)["later"]) == [*range(100, 300)]
    assert len(runner.steps) - steps < 10  # the acceptance of earlier requests counts
    assert draft_counts(engine)[1] == 0


@pytest.mark.parametrize(("ratio", "is_used"), [(0.3, True), (1.2, False)])
def test_a_draft_model_that_costs_more_than_it_saves_is_not_used(ratio: float, is_used: bool) -> None:
    runner = DraftRunner(40)
    engine, _ = drafting(runner, cost_ratio=ratio)
    engine.add_request(request("r", 8, max_tokens=60))
    assert tokens_of(run(engine)["r"]) == [*range(100, 160)]
    assert (draft_counts(engine)[0] > 20) is is_used


def test_measured_durations_replace_the_assumed_cost() -> None:
    for seconds, ratio, is_used in ((2.0, 0.1, False), (0.1, 2.0, True)):
        model, seq = draft_model(DraftRunner(40), cost_ratio=ratio), sequence(5)
        speculator = Speculator([], (), model)
        assert bool(speculator.plan([DraftLimit(seq, 8)], 1, 1)[0]) is not is_used
        model.release(seq)
        for _ in range(5):
            speculator.costs.observe(1, 1.0)
            speculator.costs.observe(9, 1.5)
            model.costs.observe(1, seconds)
            model.costs.observe(9, seconds)
        seq = sequence(5)
        assert bool(speculator.plan([DraftLimit(seq, 8)], 1, 1)[0]) is is_used


def sequence(length: int) -> Sequence:
    seq = Sequence(Request("r", [10 + i for i in range(length)], SamplingParams(max_tokens=100)), None)
    seq.tokens.append(100)
    seq.speculates = True
    return seq


def test_a_prompt_is_computed_in_parts_before_the_first_draft() -> None:
    runner = DraftRunner(80)
    engine, own = drafting(runner, blocks=120)
    engine.add_request(request("r", 200, max_tokens=60))
    assert tokens_of(run(engine)["r"]) == [*range(100, 160)]
    assert max(sum(step.values()) for step in runner.steps) <= 64
    assert draft_counts(engine)[1] > 30
    assert not own.errors
    assert not runner.errors


def test_a_cached_prefix_is_computed_once() -> None:
    runner = DraftRunner(120)
    engine, _ = drafting(runner, blocks=120)
    computed = []
    for name in ("first", "second"):
        before = sum(sum(step.values()) for step in runner.steps)
        engine.add_request(request(name, 160, max_tokens=40))
        assert tokens_of(run(engine)[name]) == [*range(100, 140)]
        computed.append(sum(sum(step.values()) for step in runner.steps) - before)
    assert computed[1] < computed[0] - 150
    before = sum(sum(step.values()) for step in runner.steps)
    engine.add_request(request("other tenant", 160, max_tokens=40, salt=b"other"))
    run(engine)
    assert sum(sum(step.values()) for step in runner.steps) - before > 150
    assert not runner.errors


def test_aborted_and_preempted_requests_leave_no_blocks() -> None:
    runner = DraftRunner(30)
    engine, own = drafting(runner, blocks=24, max_num_seqs=3)
    for index in range(5):
        engine.add_request(request(f"r{index}", [50 + index] * 12, max_tokens=60, tenant=f"t{index % 2}"))
    for step in range(400):
        if not engine.has_unfinished():
            break
        engine.step()
        engine.check_integrity()
        if step in (5, 9):
            engine.abort(f"r{step % 4}")
            engine.check_integrity()
    assert engine.stats().preemptions > 0
    assert draft_counts(engine)[1] > 0
    assert runner_is_empty(engine)
    assert not own.errors
    assert not runner.errors


def test_a_full_cache_of_the_draft_model_only_ends_drafts() -> None:
    runner = DraftRunner(5)
    engine, own = drafting(runner)
    for index in range(2):
        engine.add_request(request(f"r{index}", [50 + index] * 9, max_tokens=40))
    found = run(engine)
    assert all(tokens_of(outputs) == [*range(100, 140)] for outputs in found.values())
    assert 0 < draft_counts(engine)[0] < 30
    assert runner_is_empty(engine)
    assert not own.errors


def test_a_failure_of_the_draft_model_fails_no_request() -> None:
    runner = DraftRunner(40)
    engine, own = drafting(runner)
    engine.add_request(request("r", 8, max_tokens=60))
    for _ in range(6):
        engine.step()
    assert draft_counts(engine)[0] > 0
    runner.fails = True
    outputs = run(engine)["r"]
    assert outputs[-1].finish_reason == "length"
    assert outputs[-1].error is None
    assert not own.errors


def test_sequences_with_unknown_tokens_or_beyond_the_context_get_no_drafts() -> None:
    runner = DraftRunner(40)
    model = draft_model(runner, max_model_len=20)
    seq = sequence(10)
    assert len(model.propose([DraftRequest(seq, 3)])[0]) == 3
    assert model.room(seq) == 9
    seq.tokens.append(1000)
    assert model.propose([DraftRequest(seq, 3)]) == [[]]
    assert model.room(seq) == 0
    other = sequence(19)
    assert model.room(other) == 0
    model.check_integrity([])  # the blocks of the refused sequence were released


def test_draft_tokens_are_sampled_as_the_sequence_is() -> None:
    seen: list[Sequence] = []
    runner = DraftRunner(40)
    runner.during = lambda output: seen.extend(s.seq for s in output.scheduled)
    seq = sequence(10)
    seq.params = msgspec.structs.replace(seq.params, temperature=0.7, top_p=0.9, presence_penalty=1.0, logprobs=3, n=2)
    seq.seed = 77
    draft_model(runner).propose([DraftRequest(seq, 2)])
    assert {copied.seed for copied in seen} == {77}
    params = seen[0].params
    assert (params.temperature, params.top_p, params.presence_penalty, params.logprobs) == (0.7, 0.9, 0.0, None)


def test_large_steps_have_no_drafts() -> None:
    runner = DraftRunner(200)
    engine, _ = drafting(runner, blocks=200, max_num_seqs=16)
    for index in range(MAX_STEP_SAMPLES + 1):
        engine.add_request(request(f"r{index}", [50 + index] * 9, max_tokens=20))
    run(engine)
    assert not runner.steps


def runner_is_empty(engine: LLMEngine) -> bool:
    """Return whether the draft model's cache is unused after the last request."""
    assert engine.speculator is not None
    engine.speculator.check_integrity([])
    return True
