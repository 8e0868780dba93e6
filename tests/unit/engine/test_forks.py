"""`n` choices of one prompt: the prompt is computed and billed once, and blocks are copied where choices differ."""

from __future__ import annotations

import pytest

from inference_worker.contract.request import TokenCounts
from inference_worker.engine.engine import LLMEngine
from tests.support.engine.fakes import FakeRunner, MemoryRunner, distinct, fake_engine, request, run


def engine_with(blocks: int, *, async_scheduling: bool = False, **settings: float) -> tuple[LLMEngine, FakeRunner]:
    return fake_engine(runner=MemoryRunner(blocks, 16, async_scheduling=async_scheduling), **settings)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("length", [40, 48, 49])  # ends in a block, at its end, at the next one's first token
def test_the_prompt_is_computed_once_and_billed_once(length: int, async_scheduling: bool) -> None:
    engine, runner = engine_with(20, async_scheduling=async_scheduling)
    engine.add_request(request("a", length, max_tokens=20, n=3))
    outputs = run(engine)["a"]
    assert sum(step["a"] for step in runner.steps if step["a"] > 1) == length
    by_index = {i: [t for o in outputs if o.index == i for t in o.token_ids] for i in range(3)}
    assert by_index == {index: list(range(100, 120)) for index in range(3)}
    usages = [output.usage for output in outputs if output.usage is not None]
    assert usages == [TokenCounts(uncached=length, output=60)]
    assert outputs[-1].usage is not None
    assert sorted(output.index for output in outputs if output.finished) == [0, 1, 2]


def test_only_the_last_block_is_copied() -> None:
    engine, _ = engine_with(20)
    engine.add_request(request("a", 40, max_tokens=5, n=3))
    most = 0
    while engine.has_unfinished():
        engine.step()
        engine.check_integrity()
        most = max(most, engine.stats().kv_blocks_used)
    assert most == 2 + 3


def test_choices_have_separate_seeds() -> None:
    engine, _ = engine_with(20)
    engine.add_request(request("a", 40, max_tokens=5, n=3, seed=7))
    assert [seq.seed for seq in engine.scheduler.waiting] == [7, 8, 9]
    run(engine)


def test_choices_wait_for_each_other_with_a_small_batch() -> None:
    engine, runner = engine_with(20, max_num_seqs=1)
    engine.add_request(request("a", 40, max_tokens=3, n=3))
    outputs = run(engine)["a"]
    assert sum(len(output.token_ids) for output in outputs) == 9
    assert sum(step["a"] for step in runner.steps) == 42 + 2 * (40 - 32 + 2)  # the full blocks were cached


def test_choices_are_preempted_and_resumed() -> None:
    engine, _ = engine_with(7)
    engine.add_request(request("a", 40, max_tokens=50, n=4))
    outputs = run(engine)["a"]
    assert engine.stats().preemptions
    assert outputs[-1].usage == TokenCounts(uncached=40, output=200)


def test_an_abort_ends_all_choices() -> None:
    engine, _ = engine_with(20)
    engine.add_request(request("a", distinct(40, 1), max_tokens=50, n=3))
    for _ in range(4):
        engine.step()
    last = engine.abort("a")
    assert last is not None
    assert last.usage == TokenCounts(uncached=40, output=4 + 3 + 3)
    engine.check_integrity()
    assert not engine.has_unfinished()
    assert engine.stats().kv_blocks_used == 0


def test_a_failed_step_ends_all_choices_once() -> None:
    engine, runner = engine_with(20)
    engine.add_request(request("a", distinct(40, 1), max_tokens=50, n=3))
    engine.step()
    engine.step()

    def broken(_: object) -> None:
        raise RuntimeError("broken")

    runner.during = broken
    outputs = engine.step()
    assert [output.error is not None for output in outputs] == [True]
    engine.check_integrity()
    assert not engine.has_unfinished()
