"""Pins keep paid blocks for their time, within limits, and never make a running request wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inference_worker.contract.request import CacheBreakpoint, TokenCounts
from inference_worker.engine.engine import LLMEngine
from tests.support.engine.fakes import Clock, FakeRunner, distinct, fake_engine, request, run

FIVE, HOUR = 300, 3600


def engine_with(clock: Clock, blocks: int = 40, host: int = 0, **settings: float) -> tuple[LLMEngine, FakeRunner]:
    runner = FakeRunner(blocks)
    runner.num_host_blocks = host
    return fake_engine(runner=runner, clock=clock, **settings)


def usage_of(
    engine: LLMEngine, name: str, prompt: list[int], *points: tuple[int, int], tenant: str = "a", salt: bytes = b""
) -> TokenCounts:
    breakpoints = tuple(CacheBreakpoint(*point) for point in points)
    engine.add_request(request(name, prompt, breakpoints=breakpoints, tenant=tenant, salt=salt))
    usage = run(engine)[name][-1].usage
    assert usage is not None
    assert usage.prompt == len(prompt)
    return usage


def crowd_out(engine: LLMEngine, mark: int) -> None:
    """Use every block except the pinned ones."""
    blocks = engine.scheduler.cache.pool.num_free
    usage_of(engine, f"crowd {mark}", distinct(16 * blocks - 1, mark), tenant="crowd")


def test_whole_blocks_up_to_a_breakpoint_are_written_and_then_read() -> None:
    engine, _ = engine_with(Clock())
    assert usage_of(engine, "first", distinct(100, 1), (50, FIVE)) == TokenCounts(100 - 48, 0, 48, 0, output=1)
    assert usage_of(engine, "second", distinct(100, 1), (50, FIVE)) == TokenCounts(100 - 96, 96, output=1)


def test_two_breakpoints_have_separate_times() -> None:
    clock = Clock()
    engine, _ = engine_with(clock)
    usage = usage_of(engine, "first", distinct(100, 1), (32, HOUR), (80, FIVE))
    assert usage == TokenCounts(20, 0, 48, 32, output=1)
    clock.now = 301.0
    crowd_out(engine, 2)
    crowd_out(engine, 3)
    assert usage_of(engine, "second", distinct(100, 1)) == TokenCounts(
        68, 32, output=1
    )  # the blocks pinned for an hour remain


def test_a_pinned_prefix_is_kept_until_its_time_is_over() -> None:
    clock = Clock()
    engine, _ = engine_with(clock)
    usage_of(engine, "pinned", distinct(100, 1), (96, FIVE))
    usage_of(engine, "plain", distinct(100, 2))
    clock.now = 299.0
    crowd_out(engine, 3)
    assert usage_of(engine, "plain again", distinct(100, 2)).cache_read == 0
    assert usage_of(engine, "pinned again", distinct(100, 1)).cache_read == 96
    clock.now = 299.0 + 300.0  # the hit restarted the time, which is over now
    usage_of(engine, "another", [7])
    assert len(engine.scheduler.cache.pins) == 0
    crowd_out(engine, 4)
    assert usage_of(engine, "too late", distinct(100, 1)).cache_read == 0


def test_a_hit_restarts_the_time() -> None:
    clock = Clock()
    engine, _ = engine_with(clock)
    usage_of(engine, "first", distinct(100, 1), (96, FIVE))
    for number in range(5):
        clock.now += 299.0
        crowd_out(engine, 10 + number)
        assert usage_of(engine, f"hit {number}", distinct(100, 1)).cache_read == 96


def test_automatically_cached_blocks_are_pinned_without_a_charge() -> None:
    engine, _ = engine_with(Clock())
    usage_of(engine, "plain", distinct(100, 1))
    assert usage_of(engine, "pins", distinct(100, 1), (96, FIVE)).cache_write_5m == 0
    crowd_out(engine, 2)
    assert usage_of(engine, "again", distinct(100, 1)).cache_read == 96


def test_pins_are_limited_per_tenant_and_in_total() -> None:
    engine, _ = engine_with(Clock(), blocks=40)  # ten blocks per tenant, twenty in total
    breakpoints = (CacheBreakpoint(192, FIVE),)
    engine.add_request(request("first", distinct(200, 1), tenant="a", breakpoints=breakpoints))
    last = run(engine)["first"][-1]
    assert last.usage == TokenCounts(40, 0, 160, 0, output=1)
    assert last.cache is not None
    assert last.cache.unpinned_tokens == 32
    assert usage_of(engine, "second", distinct(100, 2), (96, FIVE)).cache_write_5m == 0
    assert usage_of(engine, "other", distinct(200, 3), (192, FIVE), tenant="b").cache_write_5m == 160
    assert usage_of(engine, "third", distinct(200, 4), (192, FIVE), tenant="c").cache_write_5m == 0
    pins = engine.scheduler.cache.pins
    assert len(pins) == 20
    pins.check_integrity()  # no tenant has more than its ten


def test_a_request_as_large_as_the_cache_evicts_all_pins() -> None:
    engine, _ = engine_with(Clock(), blocks=40)
    for number, tenant in enumerate("ab"):
        usage_of(engine, tenant, distinct(160, number), (160, FIVE), tenant=tenant)
    usage = usage_of(engine, "large", distinct(16 * 40 - 1, 9), tenant="c")
    assert usage == TokenCounts(16 * 40 - 1, output=1)


def test_a_lost_pin_is_billed_as_read() -> None:
    engine, runner = engine_with(Clock(), blocks=40)
    usage_of(engine, "first", distinct(100, 1), (96, FIVE))
    usage_of(engine, "large", distinct(16 * 40 - 1, 9), tenant="c")  # without KV offload, pinned blocks are lost
    assert usage_of(engine, "second", distinct(100, 1), (96, FIVE)) == TokenCounts(4, 96, output=1)
    assert runner.steps[-1] == {"second": 100}  # although it was computed again


def test_evicted_pinned_blocks_are_restored_from_cpu_memory() -> None:
    engine, runner = engine_with(Clock(), blocks=40, host=8)
    usage_of(engine, "first", distinct(100, 1), (96, FIVE))
    usage_of(engine, "large", distinct(16 * 40 - 1, 9), tenant="c")
    assert usage_of(engine, "second", distinct(100, 1), (96, FIVE)) == TokenCounts(4, 96, output=1)
    assert runner.steps[-1] == {"second": 4}


def test_a_failed_request_leaves_no_pin() -> None:
    engine, runner = engine_with(Clock())

    def broken(_: object) -> None:
        raise RuntimeError("broken")

    runner.during = broken
    engine.add_request(request("fails", distinct(100, 1), breakpoints=(CacheBreakpoint(96, FIVE),)))
    [failed] = engine.step()
    assert failed.error is not None
    assert len(engine.scheduler.cache.pins) == 0
    runner.during = lambda _: None
    assert usage_of(engine, "again", distinct(100, 1), (96, FIVE)).cache_write_5m == 96


@pytest.mark.parametrize(("billed", "kept"), [(True, 4), (False, 2)])
def test_an_aborted_request_keeps_billed_pins(billed: bool, kept: int) -> None:
    """An unbilled one, which exceeded its deadline, keeps only the blocks it computed pinned."""
    engine, _ = engine_with(Clock(), max_num_batched_tokens=32, max_num_seqs=4)
    engine.add_request(request("late", distinct(100, 1), breakpoints=(CacheBreakpoint(64, FIVE),)))
    engine.step()
    engine.abort("late", billed=billed)
    engine.check_integrity()
    assert len(engine.scheduler.cache.pins) == kept


def test_a_prefix_pinned_at_another_replica_is_billed_as_read_and_reported_again() -> None:
    engine, _ = engine_with(Clock())
    pinned = request("pinned", distinct(100, 1), breakpoints=(CacheBreakpoint(96, HOUR),))
    engine.add_request(pinned)
    pins = run(engine)["pinned"][-1].pins
    assert list(pins.values()) == [HOUR] * 6
    other, _ = engine_with(Clock())
    known = dict(list(pins.items())[:4])
    other.add_request(replace(request("reads", distinct(100, 1)), paid=known))
    last = run(other)["reads"][-1]
    assert (last.usage, last.pins) == (TokenCounts(36, 64, output=1), known)
    other.add_request(replace(request("marks", distinct(100, 1), breakpoints=(CacheBreakpoint(96, FIVE),)), paid=known))
    assert run(other)["marks"][-1].pins == pins | dict.fromkeys(list(pins)[4:], FIVE)


def test_a_prefix_pinned_at_another_replica_does_not_count_towards_the_limit() -> None:
    engine, _ = engine_with(Clock())
    engine.add_request(request("pinned", distinct(200, 1), breakpoints=(CacheBreakpoint(160, FIVE),)))
    pins = run(engine)["pinned"][-1].pins
    other, _ = engine_with(Clock())
    usage_of(other, "full", distinct(200, 2), (160, FIVE))
    points = (CacheBreakpoint(192, FIVE),)
    other.add_request(replace(request("again", distinct(200, 1), breakpoints=points, tenant="a"), paid=pins))
    last = run(other)["again"][-1]
    assert (last.usage, last.pins) == (TokenCounts(40, 160, output=1), pins)
    assert last.cache is not None
    assert last.cache.unpinned_tokens == 32


def test_pins_end_at_the_tenants_limit() -> None:
    engine, _ = engine_with(Clock())
    engine.add_request(replace(request("a", distinct(100, 1), breakpoints=(CacheBreakpoint(96, FIVE),)), pin_room=2))
    last = run(engine)["a"][-1]
    assert (last.usage, len(last.pins)) == (TokenCounts(68, 0, 32, 0, output=1), 2)


@pytest.mark.parametrize("seconds", [FIVE, HOUR])
def test_of_two_equal_concurrent_requests_one_writes_and_one_reads(seconds: int) -> None:
    engine, _ = engine_with(Clock())
    for name in ("first", "second"):
        engine.add_request(request(name, distinct(100, 1), breakpoints=(CacheBreakpoint(96, seconds),)))
    outputs = run(engine)
    first, second = outputs["first"][-1].usage, outputs["second"][-1].usage
    assert first is not None
    assert second is not None
    assert (first.cache_write_5m + first.cache_write_1h, first.cache_read) == (96, 0)
    assert (second.cache_write_5m + second.cache_write_1h, second.cache_read) == (0, 96)


def test_preemption_does_not_change_the_billed_tokens() -> None:
    engine, _ = engine_with(Clock(), blocks=6)
    engine.add_request(request("old", distinct(20, 1), max_tokens=60))
    breakpoints = (CacheBreakpoint(16, FIVE),)
    engine.add_request(request("new", distinct(30, 2), breakpoints=breakpoints, max_tokens=50))
    usage = run(engine)["new"][-1].usage
    assert engine.stats().preemptions >= 1
    assert usage == TokenCounts(14, 0, 16, 0, output=50)


def test_a_reset_keeps_pinned_blocks() -> None:
    engine, runner = engine_with(Clock())
    usage_of(engine, "first", distinct(100, 1), (96, FIVE))
    assert engine.reset_prefix_cache()
    engine.check_integrity()
    assert usage_of(engine, "again", distinct(100, 1)).cache_read == 96
    assert runner.steps[-1] == {"again": 100}
