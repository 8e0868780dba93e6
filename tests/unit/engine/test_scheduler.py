"""Token budgets of steps, with a fake model."""

from __future__ import annotations

import pytest

from inference_worker.contract.request import RequestRejected, TokenCounts
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.kv_cache.kv_cache import KVCacheManager
from inference_worker.engine.scheduling.scheduler import FEW_SEQUENCES, Scheduler
from inference_worker.engine.sequences.sequence import Sequence, SequenceStatus
from inference_worker.engine.sequences.step import SchedulerOutput
from tests.support.engine.fakes import distinct, fake_engine, request, run, tokens_of


def test_a_budget_is_shared_in_chunks_with_a_limit_for_long_prompts() -> None:
    engine, runner = fake_engine(200, max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    for mark in (1, 3, 4):
        engine.add_request(request(str(mark), distinct(800, mark), max_tokens=9))
    for _ in range(3):
        engine.step()
    assert [list(step.values()) for step in runner.steps] == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]


def test_the_prompts_that_start_in_a_step_are_limited() -> None:
    engine, runner = fake_engine(
        400, max_num_batched_tokens=512, long_prefill_token_threshold=256, max_starting_tokens=256
    )
    for mark, length in enumerate((100, 100, 100, 300, 40, 256)):
        engine.add_request(request(str(mark), distinct(length, 10 + mark), arrival=mark / 10, max_tokens=20))
    for _ in range(6):
        engine.step()
    starts = [[(name, count) for name, count in step.items() if count > 1] for step in runner.steps]
    assert starts == [
        [("0", 100), ("1", 100)],
        [("2", 100), ("4", 40)],  # the shorter one goes first
        [("3", 256)],
        [("3", 44), ("5", 256)],  # a prompt that continues is not limited
        [],
        [],
    ]


def test_a_prompt_that_exceeds_the_limit_of_a_step_starts_alone() -> None:
    engine, runner = fake_engine(400, max_num_batched_tokens=512, max_starting_tokens=64)
    for mark in range(2):
        engine.add_request(request(str(mark), distinct(200, 10 + mark), max_tokens=20))
    engine.step()
    engine.step()
    assert [list(step.values()) for step in runner.steps] == [[200], [1, 200]]


def test_the_prompts_that_start_in_a_step_are_not_limited_under_load() -> None:
    engine, runner = fake_engine(400, max_num_batched_tokens=512, max_starting_tokens=64)
    for mark in range(FEW_SEQUENCES + 1):
        engine.add_request(request(str(mark), distinct(40, 10 + mark), max_tokens=20))
    for _ in range(3):
        engine.step()
    assert [len(step) for step in runner.steps] == [13, 17, 17]


def test_decodes_continue_while_a_long_prompt_is_computed() -> None:
    engine, runner = fake_engine(200, max_num_batched_tokens=64)
    engine.add_request(request("long", distinct(60, 1), max_tokens=30))
    engine.step()
    engine.add_request(request("longer", distinct(600, 3), max_tokens=1))
    for _ in range(5):
        engine.step()
    assert [step["long"] for step in runner.steps] == [60, 1, 1, 1, 1, 1]
    assert [step["longer"] for step in runner.steps[1:]] == [63] * 5


def test_older_prompts_do_not_delay_a_newer_decode() -> None:
    engine, runner = fake_engine(200, max_num_batched_tokens=64, long_prefill_token_threshold=32)
    engine.add_request(request("old", distinct(600, 1), arrival=1.0))
    engine.add_request(request("new", distinct(20, 3), arrival=3.0, max_tokens=30))
    engine.step()
    engine.add_request(request("late", distinct(600, 4), arrival=2.0))  # older by arrival, as after a preemption
    for _ in range(4):
        engine.step()
    assert [step.get("new") for step in runner.steps] == [20, 1, 1, 1, 1]
    assert [sum(step.values()) for step in runner.steps[1:]] == [64] * 4


def test_running_requests_continue_with_an_arrival_in_every_step() -> None:
    engine, _ = fake_engine(400, max_num_seqs=16, max_num_batched_tokens=64)
    engine.add_request(request("first", 20, max_tokens=25))
    got: list[int] = []
    for number in range(25):
        engine.add_request(request(f"arrival {number}", distinct(60, 3 + number), max_tokens=50))
        got += [len(o.token_ids) for o in engine.step() if o.request_id == "first"]
    assert got == [1] * 25


def test_the_batch_size_is_limited() -> None:
    engine, runner = fake_engine(100, max_num_seqs=3, max_num_batched_tokens=512)
    for mark in range(5):
        engine.add_request(request(str(mark), distinct(10, mark), max_tokens=2))
    run(engine)
    assert [len(step) for step in runner.steps] == [3, 3, 2, 2]


def test_requests_run_in_order_of_arrival() -> None:
    engine, runner = fake_engine(100, max_num_seqs=1)
    for name, arrival in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        engine.add_request(request(name, distinct(10, ord(name)), arrival=arrival))
    run(engine)
    assert [next(iter(step)) for step in runner.steps] == ["a", "b", "c"]


def test_two_equal_prompts_compute_their_prefix_once() -> None:
    engine, runner = fake_engine(20)
    for name in ("first", "second"):
        engine.add_request(request(name, 40, max_tokens=3))
    outputs = run(engine)
    assert runner.steps[:2] == [{"first": 40}, {"first": 1, "second": 8}]
    usages = [outputs[name][-1].usage for name in ("first", "second")]
    assert [(u.uncached, u.cache_read) for u in usages if u] == [(40, 0), (8, 32)]


def test_a_follower_does_not_block_others() -> None:
    engine, runner = fake_engine(20)
    for name, prompt in (("first", distinct(40, 1)), ("second", distinct(40, 1)), ("third", distinct(9, 3))):
        engine.add_request(request(name, prompt))
    engine.step()
    assert runner.steps[0] == {"first": 40, "third": 9}


def test_a_follower_takes_over_from_an_aborted_leader() -> None:
    engine, runner = fake_engine(40, max_num_batched_tokens=64)
    engine.add_request(request("leader", 100))
    engine.add_request(request("follower", 100))
    engine.step()
    assert runner.steps == [{"leader": 64}]
    engine.abort("leader")
    engine.step()
    assert runner.steps[1] == {"follower": 100 - 64}  # the blocks that the leader completed are found


def test_the_newest_request_is_preempted_and_resumes_at_its_position() -> None:
    engine, runner = fake_engine(4)
    engine.add_request(request("old", distinct(20, 1), max_tokens=40))
    engine.add_request(request("new", distinct(16, 3), max_tokens=40))
    outputs = run(engine)
    assert engine.stats().preemptions >= 1
    assert tokens_of(outputs["old"]) == tokens_of(outputs["new"]) == list(range(100, 140))
    assert outputs["new"][-1].usage == TokenCounts(uncached=16, output=40)  # recomputing is not billed
    assert max(len(step) for step in runner.steps) == 2
    assert all("old" in step for step in runner.steps[:40])  # it was never preempted


def test_a_preempted_requests_token_in_flight_is_kept() -> None:
    cache = KVCacheManager(10, 16)
    scheduler = Scheduler(cache, max_num_seqs=4, max_num_batched_tokens=64)
    seq = Sequence(request("a", 20, max_tokens=5), None)
    scheduler.add(seq)
    [scheduled] = scheduler.schedule().scheduled
    scheduler._preempt(seq, 0.0, SchedulerOutput())  # while the step is in flight
    assert not scheduler.schedule().scheduled  # not before its token is known
    assert not scheduler.complete(scheduled)
    seq.tokens.append(99)
    assert seq.status is SequenceStatus.WAITING
    assert cache.lookup(seq).num_cached_tokens == 0  # the step's result was dropped with its blocks
    [again] = scheduler.schedule().scheduled
    assert (again.start, again.num_new_tokens, again.samples) == (0, 21, True)
    assert cache.pool.find(seq.block_hashes[0]) is None
    assert scheduler.complete(again)
    assert cache.pool.find(seq.block_hashes[0]) is not None
    scheduler.check_integrity()


def test_the_last_blocks_are_reserved_for_running_requests() -> None:
    engine, runner = fake_engine(6)
    engine.add_request(request("first", distinct(40, 1), max_tokens=20))
    engine.step()
    engine.add_request(request("second", distinct(45, 3), max_tokens=3))  # three blocks are free, and it requires three
    for _ in range(19):
        engine.step()
    assert all(list(step) == ["first"] for step in runner.steps)
    assert engine.stats().preemptions == 0
    assert len(tokens_of(run(engine)["second"])) == 3


def rejection(engine: LLMEngine, prompt: int, **params: object) -> RequestRejected:
    with pytest.raises(RequestRejected) as exc_info:
        engine.add_request(request("x", prompt, **params))
    engine.check_integrity()
    assert not engine.has_unfinished()
    return exc_info.value


def test_a_request_larger_than_the_cache_is_rejected() -> None:
    engine, _ = fake_engine(10)
    too_long = rejection(engine, 161)
    assert (too_long.code, too_long.param) == ("context_length_exceeded", "messages")
    assert "160 tokens" in too_long.message
    too_much = rejection(engine, 100, max_tokens=61)
    assert (too_much.code, too_much.param) == ("context_length_exceeded", "max_tokens")
    engine.add_request(request("fits", 100, max_tokens=60))
    assert len(tokens_of(run(engine)["fits"])) == 60


def test_a_request_larger_than_the_models_context_is_rejected() -> None:
    engine, _ = fake_engine(1000, max_model_len=64)
    assert rejection(engine, 64).param == "messages"
    assert rejection(engine, 60, max_tokens=5).param == "max_tokens"


@pytest.mark.parametrize(("prompt", "params"), [([], {}), ([1000], {}), ([-1], {}), ([5], {"max_tokens": 0})], ids=str)
def test_impossible_requests_are_rejected(prompt: list[int], params: dict[str, object]) -> None:
    engine, _ = fake_engine()
    with pytest.raises(RequestRejected):
        engine.add_request(request("x", prompt, **params))
    engine.check_integrity()


@pytest.mark.parametrize(("prompt", "tokens"), [(20, 141), (200, 0)])
def test_a_request_that_exceeds_the_cache_ends_with_an_error(
    prompt: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = fake_engine(10)
    with monkeypatch.context() as unchecked:
        unchecked.setattr(engine, "_check", lambda _: None)  # the check normally prevents this
        engine.add_request(request("grows", prompt, max_tokens=500))
    outputs = run(engine)["grows"]
    assert outputs[-1].error is not None
    assert outputs[-1].error.code == "context_length_exceeded"
    assert len(tokens_of(outputs)) == tokens
    engine.add_request(request("next", 20))
    assert run(engine)["next"][-1].finish_reason == "length"
