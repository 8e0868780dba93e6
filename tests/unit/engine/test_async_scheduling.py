"""Steps launched before the result of the previous step: equal output, and no token of an ended request."""

from __future__ import annotations

import pytest

from inference_worker.contract.request import RequestOutput, TokenCounts
from inference_worker.engine.engine import LLMEngine
from tests.support.engine.fakes import MemoryRunner, distinct, fake_engine, request, run, tokens_of


def ahead(blocks: int = 40, **settings: float) -> tuple[LLMEngine, MemoryRunner]:
    runner = MemoryRunner(blocks, 16, async_scheduling=True)
    engine, _ = fake_engine(runner=runner, **settings)
    return engine, runner


def test_a_step_is_launched_before_the_previous_one_has_returned() -> None:
    engine, runner = ahead()
    engine.add_request(request("a", 20, max_tokens=5))
    assert engine.step() == []
    assert runner.steps == [{"a": 20}]
    assert tokens_of(engine.step()) == [100]
    assert runner.steps == [{"a": 20}, {"a": 1}]
    assert tokens_of(run(engine)["a"]) == [101, 102, 103, 104]
    assert len(runner.steps) == 5  # none for a token after the last one


@pytest.mark.parametrize("blocks", [8, 60])
def test_the_output_equals_that_of_synchronous_steps(blocks: int) -> None:
    answers = []
    for async_scheduling in (False, True):
        engine, _ = fake_engine(
            runner=MemoryRunner(blocks, 16, async_scheduling=async_scheduling),
            max_num_seqs=4,
            max_num_batched_tokens=40,
        )
        for number in range(12):
            engine.add_request(request(str(number), distinct(20 + number, number % 5), max_tokens=15 + number))
        outputs = run(engine)
        answers.append({name: (tokens_of(some), some[-1].usage) for name, some in outputs.items()})
        assert engine.stats().kv_blocks_used == 0
    assert answers[0] == answers[1] or blocks == 8  # the order determines whether a prefix is still cached
    assert {n: a[0] for n, a in answers[0].items()} == {n: a[0] for n, a in answers[1].items()}


def test_a_token_in_flight_behind_a_stop_is_dropped() -> None:
    engine, runner = ahead()
    engine.add_request(request("a", 20, max_tokens=50, stop_token_ids=(103,)))
    outputs = run(engine)["a"]
    assert tokens_of(outputs) == [100, 101, 102, 103]
    assert outputs[-1].usage == TokenCounts(uncached=20, output=4)
    assert len(runner.steps) == 5  # one was already in flight
    assert engine.stats().kv_blocks_used == 0


def test_an_abort_takes_effect_within_two_steps_and_drops_the_token_in_flight() -> None:
    engine, runner = ahead()
    engine.add_request(request("a", 20, max_tokens=50))
    engine.add_request(request("b", distinct(20, 3), max_tokens=50))
    for _ in range(3):
        engine.step()
    last = engine.abort("a")
    assert last is not None
    assert last.usage == TokenCounts(uncached=20, output=2)  # the third is in flight
    before = len(runner.steps)
    outputs: list[RequestOutput] = engine.step() + engine.step()
    assert {output.request_id for output in outputs} == {"b"}
    assert all("a" not in step for step in runner.steps[before:])
    engine.check_integrity()


def test_blocks_of_an_ended_request_are_reused_during_its_last_step() -> None:
    engine, _ = ahead(blocks=3)
    engine.add_request(request("a", 30, max_tokens=10))
    engine.step()
    engine.step()
    engine.abort("a")
    engine.add_request(request("b", distinct(40, 3), max_tokens=4))
    assert tokens_of(run(engine)["b"]) == [100, 101, 102, 103]


def test_a_preempted_requests_token_in_flight_is_kept() -> None:
    engine, _ = ahead(blocks=4, max_num_seqs=2)
    engine.add_request(request("old", distinct(15, 1), max_tokens=45))
    engine.add_request(request("new", distinct(15, 3), max_tokens=45))
    preempted = 0
    outputs: dict[str, list[int]] = {"old": [], "new": []}
    while engine.has_unfinished():
        step = engine.step()
        for output in step:
            outputs[output.request_id] += output.token_ids
        engine.check_integrity()
        if engine.stats().preemptions > preempted:
            preempted += 1
            assert [seq.request_id for seq in engine.scheduler.waiting] == ["new"]
            assert [output.request_id for output in step] == ["old", "new"]  # its token was in flight
    assert preempted
    assert outputs == {"old": list(range(100, 145)), "new": list(range(100, 145))}


def test_a_failed_step_ends_only_its_own_requests() -> None:
    engine, runner = ahead()
    engine.add_request(request("a", 20, max_tokens=50))
    engine.step()
    engine.step()

    def broken(_: object) -> None:
        raise RuntimeError("broken")

    runner.during = broken
    outputs = engine.step()
    assert [output.error is not None for output in outputs if output.finished] == [True]
    runner.during = lambda _: None
    engine.add_request(request("b", distinct(20, 3), max_tokens=5))
    assert tokens_of(run(engine)["b"]) == list(range(100, 105))
    assert engine.stats().kv_blocks_used == 0
