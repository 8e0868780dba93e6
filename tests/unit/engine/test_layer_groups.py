"""Groups of layers with windows: the layers of a block; release, reuse, pins and forks of blocks behind a window."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import CacheBreakpoint, Request, RequestOutput, TokenCounts
from inference_worker.engine.capacity.layer_groups import BlockDemand, group_layers
from inference_worker.engine.capacity.sizing import KVMemoryError, KVSizing, size_kv_cache
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.kv_cache.kv_cache import cache_key
from inference_worker.engine.sequences.sequence import Sequence
from tests.support.engine.fakes import TINY, MemoryRunner, distinct, fake_engine, request, run

BLOCK = 16
WINDOW = 40  # tokens: 3 blocks before a boundary


@pytest.mark.parametrize(
    ("full", "window", "size", "groups"),
    [
        (13, 13, 13, 2),  # Gemma 2 with 26 layers
        (4, 22, 4, 7),  # Gemma 3 with 26 layers
        (5, 29, 5, 7),
        (8, 40, 8, 6),
        (10, 52, 10, 7),
        (1, 27, 4, 8),  # with 28 groups, a block has the keys of one layer only
        (0, 32, 32, 1),
        (32, 0, 32, 1),
        (1, 1, 1, 2),
    ],
)
def test_layers_per_block(full: int, window: int, size: int, groups: int) -> None:
    found = group_layers([0] * full + [512] * window, full + window, 8192)
    assert (found.layers_per_block, len(found.windows)) == (size, groups)
    assert found.windows == tuple(sorted(found.windows))
    assert len(set(zip(found.groups, found.places, strict=True))) == full + window  # no place is used twice
    assert max(found.places) < size
    assert [found.windows[group] for group in found.groups] == [0] * full + [512] * window


def test_a_window_that_no_sequence_exceeds_makes_no_group() -> None:
    assert group_layers([0, 4096], 2, 4096) == group_layers([], 2, 4096)
    assert len(group_layers([0, 4096], 2, 4097).windows) == 2


def test_too_many_kinds_of_layers_share_one_group() -> None:
    assert group_layers(range(1, 21), 20, 8192).windows == (0,)


def make_engine(blocks: int, *windows: int, is_async: bool = False, hosts: int = 0) -> LLMEngine:
    runner = MemoryRunner(blocks, BLOCK, windows=windows, async_scheduling=is_async, num_host_blocks=hosts)
    engine, _ = fake_engine(runner=runner, windows=windows, max_num_batched_tokens=32, max_num_seqs=4)
    return engine


def run_and_count(engine: LLMEngine) -> int:
    """Run all requests. Return the largest number of blocks that they used at one time."""
    most = 0
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None
        engine.check_integrity()
        most = max(most, engine.stats().kv_blocks_used)
    return most


@pytest.mark.parametrize("is_async", [False, True])
def test_the_blocks_of_a_long_sequence_are_bounded(is_async: bool) -> None:
    engine = make_engine(20, WINDOW, is_async=is_async)
    engine.add_request(request("x", 2000, max_tokens=2000, ignore_eos=True))
    bound = BlockDemand(BLOCK, (WINDOW,), 64).blocks_for(4000)
    assert bound == 8  # of 250
    assert run_and_count(engine) <= bound


def test_only_groups_with_a_window_release_blocks() -> None:
    engine = make_engine(100, 0, WINDOW)
    engine.add_request(request("x", 1000))
    most = run_and_count(engine)
    assert 63 < most <= 63 + BlockDemand(BLOCK, (WINDOW,), 64).blocks_for(1000)


def test_a_hit_needs_only_the_blocks_in_the_window() -> None:
    engine = make_engine(12, WINDOW)
    engine.add_request(request("x", 480))
    run(engine)
    assert len([key for key, _ in engine.scheduler.cache.pool.list_cached()]) == 12  # of 30
    outputs = run_one(engine, request("again", 490))
    assert outputs.cached_tokens == 480


def test_the_hit_is_what_all_groups_can_serve() -> None:
    engine = make_engine(60, 0, WINDOW)
    run_one(engine, request("x", 480))
    cache = engine.scheduler.cache
    seq = Sequence(request("again", 490), None)
    assert cache.lookup(seq).num_cached_tokens == 480
    assert [table.count(0) for table in cache.lookup(seq).tables] == [0, 27]
    lost = cache.pool.find(cache_key(seq.block_hashes[27], 1))
    cache.pool.take(cache.pool.free_ids())
    cache.pool.release([lost])  # type: ignore[list-item]
    cache.pool.allocate(1)
    assert cache.lookup(seq).num_cached_tokens == 27 * BLOCK
    lost = cache.pool.find(seq.block_hashes[20])
    cache.pool.release([lost])  # type: ignore[list-item]
    cache.pool.allocate(1)
    assert cache.lookup(seq).num_cached_tokens == 20 * BLOCK


def test_a_hit_has_only_the_blocks_in_the_window_of_each_group() -> None:
    engine = make_engine(120, 16, 160, is_async=True)
    run_one(engine, request("x", 480))
    hit = engine.scheduler.cache.lookup(Sequence(request("again", 490), None))
    assert [table.count(0) for table in hit.tables] == [29, 20]
    engine.add_request(request("again", 490, max_tokens=40, ignore_eos=True))
    run_and_count(engine)


def test_a_complete_hit_computes_its_last_block_again() -> None:
    engine = make_engine(60, 0, WINDOW)
    run_one(engine, request("x", 480))
    assert run_one(engine, request("again", 480)).cached_tokens == 480
    assert sum(sum(step.values()) for step in engine._runner.steps) == 480 + 16  # type: ignore[attr-defined]


@pytest.mark.parametrize("windows", [(WINDOW,), (0, WINDOW)])
def test_a_prefix_is_restored_from_cpu_memory(windows: tuple[int, ...]) -> None:
    engine = make_engine(20 * len(windows), *windows, hosts=100)
    run_one(engine, request("x", 200))
    run_one(engine, request("other", distinct(310, 5)))
    assert run_one(engine, request("again", 210)).cached_tokens == 192
    assert sum(engine._runner.steps[-1].values()) == 210 - 192  # type: ignore[attr-defined]


def test_a_pin_keeps_the_blocks_of_all_groups() -> None:
    engine = make_engine(40, 0, WINDOW)
    run_one(engine, request("x", 64, breakpoints=(CacheBreakpoint(64, 300),)))
    run_one(engine, request("other", distinct(250, 5)))
    cache = engine.scheduler.cache
    assert len(cache.pins) == 4
    assert cache.pool.num_idle_pinned == 8
    assert run_one(engine, request("again", 70)).cached_tokens == 64


def test_a_late_fork_does_not_use_released_blocks() -> None:
    """With one place in the batch, the second choice starts when the first one has passed the prompt's window."""
    runner = MemoryRunner(60, BLOCK, windows=(0, WINDOW))
    engine, _ = fake_engine(runner=runner, windows=(0, WINDOW), max_num_batched_tokens=32, max_num_seqs=1)
    engine.add_request(request("x", 100, n=2, max_tokens=100, ignore_eos=True))
    engine.step()
    for _ in range(60):
        engine.step()
        engine.check_integrity()
    first, second = engine._groups["x"].sequences
    cache = engine.scheduler.cache
    assert first.num_released[1] * BLOCK > 100 - WINDOW
    assert not cache.can_fork(first, second)
    outputs = run(engine)["x"]
    assert not runner.errors
    assert outputs[-1].usage == TokenCounts(100, 0, 0, 0, 200)


def run_one(engine: LLMEngine, added: Request) -> RequestOutput:
    engine.add_request(added)
    return run(engine)[added.request_id][-1]


def sizing(windows: tuple[int, ...], num_bytes: int, max_model_len: int = 8192) -> KVSizing:
    model = replace(TINY, num_layers=30, num_kv_heads=3, head_dim=64, windows=windows)
    return size_kv_cache(EngineConfig(Path(), max_num_batched_tokens=128), model, max_model_len, 2, num_bytes)


def test_sizing_counts_the_blocks_in_windows_only() -> None:
    full, mixed, window = sizing((), 1 << 30), sizing((0, 512) * 15, 1 << 30), sizing((512,) * 30, 1 << 30)
    assert full.token_bytes == mixed.token_bytes == 30 * 2 * 3 * 64 * 2
    assert (full.block_bytes, mixed.block_bytes, window.block_bytes) == (737_280, 368_640, 737_280)
    assert (full.longest_requests, mixed.longest_requests, window.longest_requests) == (5, 10, 58)
    assert mixed.demand.blocks_for(8192) == 256 + 25
    assert (full.num_tokens, mixed.num_tokens) == (46_592, (2912 - 25) * 32)
    assert window.num_tokens >= 8192


def test_a_cache_that_is_too_small_for_one_request_is_rejected() -> None:
    assert sizing((0, 512) * 15, 281 * 368_640).longest_requests == 1
    with pytest.raises(KVMemoryError, match="max_model_len=8160"):
        sizing((0, 512) * 15, 280 * 368_640)
