"""Pins: what a tenant pays to keep stays for its time, within caps, and never keeps a running request waiting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inference_worker.contract.request import CacheBreakpoint, TokenUsage
from inference_worker.engine.engine import LLMEngine
from tests.support.engine.fakes import Clock, FakeRunner, distinct, fake_engine, request, run

FIVE, HOUR = 300, 3600


def engine_with(clock: Clock, blocks: int = 40, host: int = 0, **settings: float) -> tuple[LLMEngine, FakeRunner]:
    runner = FakeRunner(blocks)
    runner.num_host_blocks = host
    return fake_engine(runner=runner, clock=clock, **settings)


def ask(
    engine: LLMEngine, name: str, prompt: list[int], *points: tuple[int, int], tenant: str = "a", salt: bytes = b""
) -> TokenUsage:
    breakpoints = tuple(CacheBreakpoint(*point) for point in points)
    engine.add_request(request(name, prompt, breakpoints=breakpoints, tenant=tenant, salt=salt))
    usage = run(engine)[name][-1].usage
    assert usage is not None
    assert usage.prompt == len(prompt)
    return usage


def crowd_out(engine: LLMEngine, mark: int) -> None:
    """Use every block that can be had without touching the pinned ones."""
    blocks = engine.scheduler.cache.pool.num_free
    ask(engine, f"crowd {mark}", distinct(16 * blocks - 1, mark), tenant="crowd")


def test_whole_blocks_up_to_a_breakpoint_are_written_and_then_read() -> None:
    engine, _ = engine_with(Clock())
    assert ask(engine, "first", distinct(100, 1), (50, FIVE)) == TokenUsage(100 - 48, 0, 48, 0, output=1)
    assert ask(engine, "second", distinct(100, 1), (50, FIVE)) == TokenUsage(100 - 96, 96, output=1)


def test_two_breakpoints_have_each_its_time() -> None:
    clock = Clock()
    engine, _ = engine_with(clock)
    usage = ask(engine, "first", distinct(100, 1), (32, HOUR), (80, FIVE))
    assert usage == TokenUsage(20, 0, 48, 32, output=1)
    clock.now = 301.0
    crowd_out(engine, 2)
    crowd_out(engine, 3)
    assert ask(engine, "second", distinct(100, 1)) == TokenUsage(68, 32, output=1)  # the hour's blocks are left


def test_a_pinned_prefix_outlasts_a_crowd_and_goes_with_its_time() -> None:
    clock = Clock()
    engine, _ = engine_with(clock)
    ask(engine, "pinned", distinct(100, 1), (96, FIVE))
    ask(engine, "plain", distinct(100, 2))
    clock.now = 299.0
    crowd_out(engine, 3)
    assert ask(engine, "plain again", distinct(100, 2)).cache_read == 0
    assert ask(engine, "pinned again", distinct(100, 1)).cache_read == 96
    clock.now = 299.0 + 300.0  # the hit began its time again, and now that is up
    ask(engine, "somebody", [7])
    assert len(engine.scheduler.cache.pins) == 0
    crowd_out(engine, 4)
    assert ask(engine, "too late", distinct(100, 1)).cache_read == 0


def test_a_hit_begins_the_time_anew() -> None:
    clock = Clock()
    engine, _ = engine_with(clock)
    ask(engine, "first", distinct(100, 1), (96, FIVE))
    for number in range(5):
        clock.now += 299.0
        crowd_out(engine, 10 + number)
        assert ask(engine, f"hit {number}", distinct(100, 1)).cache_read == 96


def test_what_was_cached_by_itself_is_pinned_without_a_charge() -> None:
    engine, _ = engine_with(Clock())
    ask(engine, "plain", distinct(100, 1))
    assert ask(engine, "pins", distinct(100, 1), (96, FIVE)).cache_write_5m == 0
    crowd_out(engine, 2)
    assert ask(engine, "again", distinct(100, 1)).cache_read == 96


def test_pins_stop_at_the_tenants_cap_and_at_that_of_all() -> None:
    engine, _ = engine_with(Clock(), blocks=40)  # ten blocks a tenant, twenty in all
    breakpoints = (CacheBreakpoint(192, FIVE),)
    engine.add_request(request("first", distinct(200, 1), tenant="a", breakpoints=breakpoints))
    last = run(engine)["first"][-1]
    assert last.usage == TokenUsage(40, 0, 160, 0, output=1)
    assert last.cache is not None
    assert last.cache.unpinned_tokens == 32
    assert ask(engine, "second", distinct(100, 2), (96, FIVE)).cache_write_5m == 0
    assert ask(engine, "other", distinct(200, 3), (192, FIVE), tenant="b").cache_write_5m == 160
    assert ask(engine, "third", distinct(200, 4), (192, FIVE), tenant="c").cache_write_5m == 0
    pins = engine.scheduler.cache.pins
    assert (pins.held_by("a"), pins.held_by("b"), pins.held_by("c"), len(pins)) == (10, 10, 0, 20)


def test_a_request_as_large_as_the_cache_runs_past_everybodys_pins() -> None:
    engine, _ = engine_with(Clock(), blocks=40)
    for number, tenant in enumerate("ab"):
        ask(engine, tenant, distinct(160, number), (160, FIVE), tenant=tenant)
    usage = ask(engine, "large", distinct(16 * 40 - 1, 9), tenant="c")
    assert usage == TokenUsage(16 * 40 - 1, output=1)


def test_a_pin_that_was_lost_bills_as_read() -> None:
    engine, runner = engine_with(Clock(), blocks=40)
    ask(engine, "first", distinct(100, 1), (96, FIVE))
    ask(engine, "large", distinct(16 * 40 - 1, 9), tenant="c")  # there is no second tier: the pinned blocks are lost
    assert ask(engine, "second", distinct(100, 1), (96, FIVE)) == TokenUsage(4, 96, output=1)
    assert runner.steps[-1] == {"second": 100}  # though it was computed again


def test_pinned_blocks_that_must_go_are_restored_from_the_host() -> None:
    engine, runner = engine_with(Clock(), blocks=40, host=8)
    ask(engine, "first", distinct(100, 1), (96, FIVE))
    ask(engine, "large", distinct(16 * 40 - 1, 9), tenant="c")
    assert ask(engine, "second", distinct(100, 1), (96, FIVE)) == TokenUsage(4, 96, output=1)
    assert runner.steps[-1] == {"second": 4}


def test_a_request_that_fails_leaves_no_pin_behind() -> None:
    engine, runner = engine_with(Clock())

    def broken(_: object) -> None:
        raise RuntimeError("broken")

    runner.during = broken
    engine.add_request(request("fails", distinct(100, 1), breakpoints=(CacheBreakpoint(96, FIVE),)))
    [failed] = engine.step()
    assert failed.error is not None
    assert len(engine.scheduler.cache.pins) == 0
    runner.during = lambda _: None
    assert ask(engine, "again", distinct(100, 1), (96, FIVE)).cache_write_5m == 96


@pytest.mark.parametrize(("billed", "kept"), [(True, 4), (False, 2)])
def test_who_is_aborted_keeps_what_is_billed(billed: bool, kept: int) -> None:
    """One that is not billed, as it ran past its time, leaves pinned what it computed, and nothing else."""
    engine, _ = engine_with(Clock(), max_num_batched_tokens=32, max_num_seqs=4)
    engine.add_request(request("late", distinct(100, 1), breakpoints=(CacheBreakpoint(64, FIVE),)))
    engine.step()
    engine.abort("late", billed=billed)
    engine.check_integrity()
    assert len(engine.scheduler.cache.pins) == kept


def test_what_is_paid_for_elsewhere_is_read_and_told_of_again() -> None:
    engine, _ = engine_with(Clock())
    pinned = request("pinned", distinct(100, 1), breakpoints=(CacheBreakpoint(96, HOUR),))
    engine.add_request(pinned)
    pins = run(engine)["pinned"][-1].pins
    assert list(pins.values()) == [HOUR] * 6
    other, _ = engine_with(Clock())
    known = dict(list(pins.items())[:4])
    other.add_request(replace(request("reads", distinct(100, 1)), paid=known))
    last = run(other)["reads"][-1]
    assert (last.usage, last.pins) == (TokenUsage(36, 64, output=1), known)
    other.add_request(replace(request("marks", distinct(100, 1), breakpoints=(CacheBreakpoint(96, FIVE),)), paid=known))
    assert run(other)["marks"][-1].pins == pins | dict.fromkeys(list(pins)[4:], FIVE)


def test_what_is_paid_for_elsewhere_needs_no_place_under_the_cap() -> None:
    engine, _ = engine_with(Clock())
    engine.add_request(request("pinned", distinct(200, 1), breakpoints=(CacheBreakpoint(160, FIVE),)))
    pins = run(engine)["pinned"][-1].pins
    other, _ = engine_with(Clock())
    ask(other, "full", distinct(200, 2), (160, FIVE))
    points = (CacheBreakpoint(192, FIVE),)
    other.add_request(replace(request("again", distinct(200, 1), breakpoints=points, tenant="a"), paid=pins))
    last = run(other)["again"][-1]
    assert (last.usage, last.pins) == (TokenUsage(40, 160, output=1), pins)
    assert last.cache is not None
    assert last.cache.unpinned_tokens == 32


def test_pins_stop_where_the_tenant_has_no_room_left() -> None:
    engine, _ = engine_with(Clock())
    engine.add_request(replace(request("a", distinct(100, 1), breakpoints=(CacheBreakpoint(96, FIVE),)), pin_room=2))
    last = run(engine)["a"][-1]
    assert (last.usage, len(last.pins)) == (TokenUsage(68, 0, 32, 0, output=1), 2)


@pytest.mark.parametrize("seconds", [FIVE, HOUR])
def test_of_two_alike_at_once_the_first_pays_the_write_and_the_other_reads(seconds: int) -> None:
    engine, _ = engine_with(Clock())
    for name in ("first", "second"):
        engine.add_request(request(name, distinct(100, 1), breakpoints=(CacheBreakpoint(96, seconds),)))
    outputs = run(engine)
    first, second = outputs["first"][-1].usage, outputs["second"][-1].usage
    assert first is not None
    assert second is not None
    assert (first.cache_write_5m + first.cache_write_1h, first.cache_read) == (96, 0)
    assert (second.cache_write_5m + second.cache_write_1h, second.cache_read) == (0, 96)


def test_preemption_changes_nothing_of_the_bill() -> None:
    engine, _ = engine_with(Clock(), blocks=6)
    engine.add_request(request("old", distinct(20, 1), max_tokens=60))
    breakpoints = (CacheBreakpoint(16, FIVE),)
    engine.add_request(request("new", distinct(30, 2), breakpoints=breakpoints, max_tokens=50))
    usage = run(engine)["new"][-1].usage
    assert engine.stats().preemptions >= 1
    assert usage == TokenUsage(14, 0, 16, 0, output=50)


def test_a_reset_keeps_what_was_paid_for() -> None:
    engine, runner = engine_with(Clock())
    ask(engine, "first", distinct(100, 1), (96, FIVE))
    assert engine.reset_prefix_cache()
    engine.check_integrity()
    assert ask(engine, "again", distinct(100, 1)).cache_read == 96
    assert runner.steps[-1] == {"again": 100}
