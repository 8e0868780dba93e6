"""KV offload: blocks evicted from the device are restored from CPU memory with their contents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import CacheReport, Request, SamplingParams
from inference_worker.engine.attention.base import AttentionSpec, CacheShape
from inference_worker.engine.attention.registry import make_backend
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.kv_cache.block_copies import BlockCopies
from inference_worker.engine.kv_cache.cpu_offload import KVOffloadCache
from inference_worker.engine.sequences.step import BlockOperation
from tests.support.engine.fakes import MemoryRunner, distinct, fake_engine, request, run, tokens_of


def cached(engine: LLMEngine, name: str, prompt: list[int]) -> int:
    engine.add_request(request(name, prompt))
    return run(engine)[name][-1].cached_tokens


def report(engine: LLMEngine, name: str, prompt: list[int]) -> CacheReport:
    engine.add_request(request(name, prompt))
    found = run(engine)[name][-1].cache
    assert found is not None
    return found


def test_evicted_blocks_are_restored() -> None:
    runner = MemoryRunner(8, 16, num_host_blocks=30)
    engine, _ = fake_engine(runner=runner)
    for mark in range(4):
        assert cached(engine, f"first {mark}", distinct(100, mark)) == 0
    for mark in range(3):
        assert cached(engine, f"again {mark}", distinct(100, mark)) == 96
        assert runner.steps[-1] == {f"again {mark}": 4}


def test_tokens_from_cpu_memory_are_reported() -> None:
    engine, _ = fake_engine(runner=MemoryRunner(8, 16, num_host_blocks=30))
    for mark in range(4):
        assert report(engine, f"first {mark}", distinct(100, mark)).host_tokens == 0
    assert report(engine, "again", distinct(100, 0)) == CacheReport(host_tokens=96)
    assert report(engine, "on the device", distinct(100, 0)) == CacheReport()


def test_without_offload_evicted_blocks_are_computed_again() -> None:
    engine, _ = fake_engine(runner=MemoryRunner(8, 16))
    assert [cached(engine, f"{mark}", distinct(100, mark)) for mark in range(3)] == [0, 0, 0]
    assert cached(engine, "again", distinct(100, 0)) == 0


def test_cpu_memory_keeps_the_most_recently_used_blocks() -> None:
    engine, _ = fake_engine(runner=MemoryRunner(8, 16, num_host_blocks=6))
    for mark in range(4):
        cached(engine, f"first {mark}", distinct(100, mark))
    assert cached(engine, "old", distinct(100, 0)) == 0


def test_blocks_that_cost_more_to_restore_than_to_compute_are_computed() -> None:
    engine, _ = fake_engine(runner=MemoryRunner(8, 16, num_host_blocks=20))
    for mark in range(3):
        cached(engine, f"first {mark}", distinct(100, mark))
    engine.scheduler.cache.restores = False
    assert cached(engine, "again", distinct(100, 0)) == 0


def test_a_reset_clears_cpu_memory_too() -> None:
    engine, _ = fake_engine(runner=MemoryRunner(8, 16, num_host_blocks=20))
    for mark in range(3):
        cached(engine, f"first {mark}", distinct(100, mark))
    assert engine.reset_prefix_cache()
    assert cached(engine, "again", distinct(100, 0)) == 0


def test_a_failed_step_saves_no_blocks() -> None:
    runner = MemoryRunner(8, 16, num_host_blocks=20)
    engine, _ = fake_engine(runner=runner)
    cached(engine, "first", distinct(100, 0))

    def broken(_: object) -> None:
        runner._queue.clear()
        raise RuntimeError("broken")

    runner.during = broken
    engine.add_request(request("breaks", distinct(100, 1)))
    engine.step()
    runner.during = lambda _: None
    engine.check_integrity()
    assert cached(engine, "again", distinct(100, 0)) <= 32  # at most the two blocks that were never evicted


def test_pinned_blocks_evict_others_and_are_not_evicted() -> None:
    tier = KVOffloadCache(2, is_pinned=lambda h: h.startswith(b"pin"))
    assert [tier.put(h) for h in (b"a", b"b")] == [0, 1]
    assert tier.put(b"c") == 0
    assert tier.put(b"pin 1") == 1
    assert tier.put(b"pin 2") == 0
    assert tier.put(b"d") is None
    assert tier.put(b"pin 3") == 1
    assert (b"pin 1" in tier, b"pin 3" in tier) == (False, True)
    tier.check_integrity()


def test_a_slot_being_read_is_not_written_in_the_same_step() -> None:
    tier = KVOffloadCache(1)
    tier.put(b"a")
    assert tier.take(b"a") == 0
    assert tier.put(b"b") is None
    tier.end_step()
    assert tier.put(b"b") == 0
    tier.check_integrity()


@pytest.mark.parametrize("attention", ["cpu", "reference"])
def test_the_copies_move_whole_blocks(attention: str) -> None:
    shape = CacheShape(3, 6, 4, 2, 8, torch.float32, torch.device("cpu"))
    pages = make_backend(attention, shape, 4, [AttentionSpec(1.0)] * 3)[0].pages()
    for page in pages:
        assert page.shape[0] == 6
        page.copy_(torch.randn(page.shape))
    before = [page.clone() for page in pages]
    copies = BlockCopies(pages, 2)
    for page, old in zip(pages, before, strict=True):
        page.copy_(old)  # the timing has used block 0
    kinds = [("save", 1, 0), ("save", 2, 1), ("copy", 3, 1), ("copy", 4, 3), ("restore", 0, 5), ("restore", 1, 4)]
    copies.run([BlockOperation(*kind) for kind in kinds])  # type: ignore[arg-type]
    for page, old in zip(pages, before, strict=True):
        assert torch.equal(page, old[[0, 3, 2, 4, 2, 1]])


def test_the_models_output_is_equal_with_restored_blocks(model_dir: Path) -> None:
    config = EngineConfig(
        model_dir, dtype="float32", num_blocks=10, block_size=16, kv_offload_bytes=64 << 20, threads=1, max_num_seqs=4,
        measure_peaks=False,
    )  # fmt: skip
    engine = LLMEngine(config)
    prompts = [[(7 * mark + 3 * i) % 4000 + 100 for i in range(100)] for mark in range(3)]
    answers: list[list[list[int]]] = [[], []]
    for turn in range(2):
        for mark, prompt in enumerate(prompts):
            name = f"{turn} {mark}"
            engine.add_request(Request(name, prompt, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)))
            outputs = run(engine)[name]
            answers[turn].append(tokens_of(outputs))
            assert outputs[-1].cached_tokens == 96 * turn
    assert answers[0] == answers[1]
