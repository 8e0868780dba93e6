"""Telemetry of the engine. The clock is the test's, so every value is exact."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.contract import metric_families as families
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.metric_families import Histogram
from inference_worker.contract.request import ServiceClass, TokenCounts
from inference_worker.engine.capacity.roofline import BatchShape, Peaks, Roofline
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.telemetry.telemetry import EngineMetrics
from tests.support.engine.fakes import TINY, Clock, FakeRunner, MemoryRunner, distinct, request, run

# TINY: 448 parameters in its layer, 8,000 in its head, 32 operations per pair of tokens, 64 bytes of KV per token.
LAYER, HEAD, PAIR, KV = 2 * 448, 2 * 8000, 32, 64


class Bench:
    """An engine whose steps take `took` seconds each, and whose timer advances by one tick at each reading."""

    def __init__(self, num_blocks: int = 20, runner: FakeRunner | None = None, **settings: float) -> None:
        self.clock = Clock()
        self.took = 1.0
        self.ticks = 0.0
        self.runner = runner or FakeRunner(num_blocks)
        self.runner.during = self._pass
        self.runner.roofline = replace(self.runner.roofline, peaks=Peaks(flops=1e6, bandwidth=1e5))
        config = EngineConfig(model_dir=Path(), block_size=16, **settings)  # type: ignore[arg-type]
        self.engine = LLMEngine(config, runner=self.runner, model_config=TINY, clock=self.clock, timer=self._tick)

    @property
    def metrics(self) -> EngineMetrics:
        return self.engine.metrics

    def step(self, took: float) -> None:
        self.took = took
        self.engine.step()

    def _pass(self, _: object) -> None:
        self.clock.now += self.took

    def _tick(self) -> float:
        self.ticks += 1
        return self.ticks


def counter(metrics: EngineMetrics, name: str, label: str = "") -> float:
    return metrics.snapshot().counters[name][label]


def count(metrics: EngineMetrics, name: str) -> tuple[int, float]:
    """Return the number of observations and their sum."""
    histogram = metrics.snapshot().histograms[name]
    return sum(histogram.counts), histogram.sum


def observed(metrics: EngineMetrics, name: str) -> dict[float, int]:
    """Return the number of observations in each bucket that has any, by its upper bound."""
    bounds = next(family.buckets for family in families.HISTOGRAMS if family.name == name)
    counts = metrics.snapshot().histograms[name].counts
    return {bound: count for bound, count in zip((*bounds, math.inf), counts, strict=True) if count}


def test_a_requests_metrics_are_exact() -> None:
    bench = Bench(max_num_batched_tokens=20, max_num_seqs=4)
    bench.clock.now = 5
    bench.engine.add_request(request("x", 32, max_tokens=3, tenant="t", service_class=ServiceClass.FLEX))
    bench.clock.now = 7
    for took in (2, 2, 3, 1):  # a chunk of 20 tokens, one of 12 and the first token, two more
        bench.step(took)
    snapshot = bench.metrics.snapshot()
    assert {name: count(bench.metrics, name) for name in snapshot.histograms} == {
        families.TTFT: (1, 6),
        families.ITL: (2, 4),
        families.TPOT: (1, 2),
        families.E2E: (1, 10),
        families.QUEUE_TIME: (1, 2),
        families.INFERENCE_TIME: (1, 8),
        families.PREFILL_TIME: (1, 4),
        families.DECODE_TIME: (1, 4),
        families.ITERATION_TOKENS: (4, 34),
        families.REQUEST_PROMPT: (1, 32),
        families.REQUEST_GENERATION: (1, 3),
        families.REQUEST_COMPUTED: (1, 32),
        families.STEP_DURATION: (4, 12),  # each of the three parts of a step takes one tick
    }
    assert observed(bench.metrics, families.ITL) == {1: 1, 5: 1}  # 1 s and 3 s
    assert snapshot.counters[families.SUCCESS] == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    assert snapshot.counters[families.MISSES] == {"first_use": 1}
    assert (snapshot.counters[families.PREEMPTIONS], snapshot.counters[families.REQUEST_ERRORS]) == ({"": 0}, {})
    billed = snapshot.counters[families.BILLED_TOKENS]
    assert (billed["uncached"], billed["output"], sum(billed.values())) == (32, 3, 35)


def test_the_arrival_is_the_requests_time_but_not_in_the_future() -> None:
    for name, arrival, arrived_at in (("early", 4.0, 4), ("unsaid", 0.0, 10), ("later", 99.0, 10)):
        bench = Bench()
        bench.clock.now = 10
        bench.engine.add_request(request(name, distinct(16, len(name)), arrival=arrival))
        bench.clock.now = 12
        run(bench.engine)
        assert count(bench.metrics, families.QUEUE_TIME) == (1, 12 - arrived_at)


def test_cached_tokens_and_billed_tokens_are_counted_separately() -> None:
    bench = Bench()
    for name in ("first", "again"):
        bench.engine.add_request(request(name, 32))
        outputs = run(bench.engine)[name]
    assert outputs[-1].usage == TokenCounts(cache_read=32, output=1)
    assert counter(bench.metrics, families.CACHE_QUERIES) == 64
    assert counter(bench.metrics, families.CACHE_HITS) == 16  # the last block is computed again, for its logits
    assert bench.metrics.snapshot().counters[families.MISSES] == {"first_use": 1}
    assert count(bench.metrics, families.REQUEST_COMPUTED) == (2, 48)


def test_a_prompt_that_does_not_read_the_cache_is_not_a_cache_query() -> None:
    bench = Bench()
    bench.engine.add_request(request("x", 32, prompt_logprobs=1))
    run(bench.engine)
    assert counter(bench.metrics, families.CACHE_QUERIES) == 0
    assert counter(bench.metrics, families.PROMPT_TOKENS) == 32


def test_finish_reasons_have_vllms_names_and_only_completed_requests_are_billed() -> None:
    bench = Bench(num_blocks=4, max_num_seqs=4)
    ended = []
    for name, prompt in (("done", 16), ("cancelled", 16), ("broken", 16)):
        bench.engine.add_request(request(name, distinct(prompt, len(name)), max_tokens=2))
        if name == "cancelled":
            bench.step(1)
            ended.append(bench.engine.abort(name))
        if name == "broken":
            bench.runner.choose = lambda _: 1 // 0
        ended += [output for output in run(bench.engine).get(name, ()) if output.finished]
    counters = bench.metrics.snapshot().counters
    assert counters[families.SUCCESS] == {"stop": 0, "length": 1, "abort": 1, "error": 1}
    assert counters[families.REQUEST_ERRORS] == {"internal_error": 1}
    assert counters[families.BILLED_TOKENS] == {
        "uncached": 32, "cache_read": 0, "cache_write_5m": 0, "cache_write_1h": 0, "output": 3
    }  # fmt: skip
    assert [(output.finish_reason, output.error and output.error.code) for output in ended] == [
        ("length", None), ("cancelled", None), (None, "internal_error")
    ]  # fmt: skip


def test_a_request_that_never_started_has_only_waiting_time() -> None:
    bench = Bench()
    bench.engine.add_request(request("x", 16))
    bench.clock.now = 3
    output = bench.engine.abort("x")
    assert output is not None
    assert output.usage == TokenCounts()
    observed_once = {families.QUEUE_TIME: (1, 3), families.E2E: (1, 3)}
    for name in bench.metrics.snapshot().histograms:
        assert count(bench.metrics, name) == observed_once.get(name, (0, 0)), name


def test_several_choices_are_one_request() -> None:
    bench = Bench()
    bench.engine.add_request(request("x", 20, n=2, max_tokens=2))
    for took in (1, 2, 4):  # the prompt and the first's token; the first's end, the second's begin; its end
        bench.step(took)
    assert count(bench.metrics, families.TTFT) == (1, 1)
    assert count(bench.metrics, families.TPOT) == (1, 3)
    assert observed(bench.metrics, families.ITL) == {2: 1, 5: 1}  # 2 s and 4 s
    assert count(bench.metrics, families.REQUEST_GENERATION) == (1, 4)
    assert count(bench.metrics, families.E2E) == (1, 7)
    assert bench.metrics.snapshot().counters[families.BATCHED_SEQUENCES] == {"": 4}


def test_preemptions_are_counted_and_their_wait_is_inter_token_latency() -> None:
    bench = Bench(num_blocks=4, max_num_seqs=2)
    bench.engine.add_request(request("a", distinct(30, 1), max_tokens=20))
    bench.engine.add_request(request("b", distinct(15, 2), max_tokens=20))
    tokens_at: dict[str, list[float]] = {"a": [], "b": []}
    while bench.engine.has_unfinished():
        for output in bench.engine.step():
            tokens_at[output.request_id] += [bench.clock.now] * len(output.token_ids)
    longest = {name: max(after - before for before, after in pairwise(at)) for name, at in tokens_at.items()}
    assert counter(bench.metrics, families.PREEMPTIONS) >= 1
    assert longest["b"] > 1 == longest["a"]  # b was preempted
    gaps = count(bench.metrics, families.ITL)
    assert gaps == (38, sum(at[-1] - at[0] for at in tokens_at.values()))


def test_a_steps_metrics_are_exact() -> None:
    bench = Bench(max_num_batched_tokens=20, max_num_seqs=4)
    bench.engine.add_request(request("a", distinct(18, 1), max_tokens=9))
    bench.step(1)
    first = bench.metrics.snapshot()
    flops = LAYER * 18 + HEAD + PAIR * (18 * 19 // 2)
    assert first.counters[families.COMPUTED_TOKENS] == {"prefill": 18, "decode": 0}
    assert first.counters[families.BATCHED_SEQUENCES][""] == 1
    assert first.counters[families.FLOPS][""] == flops
    assert first.counters[families.BYTES_READ][""] == 4 * (448 + 8000) + KV * 18
    assert first.counters[families.FORWARD_SECONDS] == {"prefill": 1, "decode": 0}
    assert first.gauges[families.MFU] == pytest.approx(flops / 1e6)

    bench.engine.add_request(request("b", distinct(40, 2), max_tokens=9))
    bench.step(1)
    # One decode with a context of 19, and the first 19 tokens of b's prompt, which sample no token yet.
    mixed = bench.metrics.snapshot()
    decode, prefill = LAYER + HEAD + PAIR * 19, LAYER * 19 + PAIR * (19 * 20 // 2)
    assert mixed.counters[families.COMPUTED_TOKENS] == {"prefill": 37, "decode": 1}
    assert mixed.counters[families.BATCHED_SEQUENCES][""] == 3
    assert mixed.counters[families.FLOPS][""] == flops + decode + prefill
    assert mixed.counters[families.BYTES_READ][""] == 2 * 4 * 8448 + KV * (18 + 38)
    assert mixed.counters[families.BYTES_WRITTEN][""] == KV * (18 + 20)
    assert mixed.counters[families.STEP_SECONDS] == {"schedule": 2, "forward": 2, "output": 2}
    assert count(bench.metrics, families.STEP_DURATION) == (2, 6)
    assert mixed.counters[families.FORWARD_SECONDS]["prefill"] == pytest.approx(1 + prefill / (prefill + decode))
    assert mixed.counters[families.FORWARD_SECONDS]["decode"] == pytest.approx(decode / (prefill + decode))
    assert mixed.gauges[families.MFU] == pytest.approx((flops + prefill + decode) / 2 / 1e6)
    moved = 2 * 4 * 8448 + KV * (18 + 18 + 58)
    assert mixed.gauges[families.BANDWIDTH_USE] == pytest.approx(moved / 2 / 1e5)
    stats = bench.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks, stats.kv_blocks_used) == (2, 0, 20, 4)


def test_a_step_launched_ahead_is_not_timed_twice() -> None:
    runner = MemoryRunner(20, 16, async_scheduling=True)
    bench = Bench(runner=runner)
    bench.engine.add_request(request("x", 16, max_tokens=5))
    run(bench.engine)
    assert bench.engine.stats().steps == 5
    # The timer is read when the first step is scheduled and launched, and when the last one returns and ends.
    assert counter(bench.metrics, families.STEP_SECONDS, "forward") == (bench.ticks - 1) - 2
    assert count(bench.metrics, families.STEP_DURATION) == (5, bench.ticks - 1)


def test_utilization_is_that_of_the_last_steps() -> None:
    bench = Bench()
    runner = bench.runner
    metrics = EngineMetrics(bench.engine.scheduler, runner.roofline, runner.attention_choice, max_recent_steps=2)
    bench.engine.metrics = metrics
    totals = [0.0]  # after each step
    moved = [0.0]
    for index, prompt in enumerate((64, 16, 32)):
        bench.engine.add_request(request(str(index), distinct(prompt, index + 1)))
        run(bench.engine)
        counters = metrics.snapshot().counters
        totals.append(counters[families.FLOPS][""])
        moved.append(counters[families.BYTES_READ][""] + counters[families.BYTES_WRITTEN][""])
    assert metrics.snapshot().counters[families.COMPUTED_TOKENS] == {"prefill": 112, "decode": 0}
    assert metrics.snapshot().gauges[families.MFU] == pytest.approx((totals[3] - totals[1]) / 2 / 1e6)
    assert metrics.snapshot().gauges[families.BANDWIDTH_USE] == pytest.approx((moved[3] - moved[1]) / 2 / 1e5)
    assert metrics.snapshot().gauges[families.PEAK_FLOPS] == 1e6


def test_a_higher_rate_than_the_measured_peak_becomes_the_peak() -> None:
    bench = Bench()
    peaks = Peaks(flops=10.0, bandwidth=10.0)  # measured beside other processes
    roofline = replace(bench.runner.roofline, peaks=peaks)
    bench.engine.metrics = EngineMetrics(
        bench.engine.scheduler, roofline, bench.runner.attention_choice, max_recent_steps=1
    )
    bench.engine.add_request(request("long", distinct(64, 1)))
    run(bench.engine)
    first = bench.metrics.snapshot()
    assert first.gauges[families.PEAK_FLOPS] == pytest.approx(first.counters[families.FLOPS][""])
    assert (first.gauges[families.MFU], first.gauges[families.BANDWIDTH_USE]) == (1, 1)
    bench.engine.add_request(request("short", distinct(16, 2)))
    run(bench.engine)
    second = bench.metrics.snapshot()
    assert second.gauges[families.PEAK_FLOPS] == first.gauges[families.PEAK_FLOPS]
    assert 0 < second.gauges[families.MFU] < 1


def test_an_unmeasured_device_has_no_utilization() -> None:
    bench = Bench()
    bench.engine.metrics = EngineMetrics(
        bench.engine.scheduler, replace(bench.runner.roofline, peaks=None), bench.runner.attention_choice
    )
    bench.engine.add_request(request("x", 16))
    run(bench.engine)
    assert set(bench.metrics.snapshot().gauges.values()) == {0.0}


OF_UPSTREAMS = {
    families.UPSTREAM_CIRCUIT_OPEN,
    families.UPSTREAM_REQUESTS_LEFT,
    families.UPSTREAM_TENANTS_PAUSED,
    families.UPSTREAM_TOKENS_LEFT,
    families.UPSTREAM_WAITS,
}


def test_a_snapshot_has_all_families_and_does_not_change() -> None:
    bench = Bench()
    before = bench.metrics.snapshot()
    bench.engine.add_request(request("x", 16, max_tokens=3))
    run(bench.engine)
    for reported, known in (
        (before.counters, families.COUNTERS),
        (before.gauges, families.GAUGES),
        (before.histograms, families.HISTOGRAMS),
    ):
        of_engines = [family.name for family in known if family.name not in OF_UPSTREAMS]
        assert list(reported) == of_engines
    assert not any(value for values in before.counters.values() for value in values.values())
    assert not any(sum(histogram.counts) for histogram in before.histograms.values())


@given(st.lists(st.floats(0, 20, allow_nan=False)))
def test_histogram_bounds_are_inclusive(values: list[float]) -> None:
    histogram = Histogram((1, 2.5, 10))
    for value in values:
        histogram.observe(value)
    expected = [sum(value <= bound for value in values) for bound in histogram.bounds]
    assert histogram.snapshot().cumulative() == [*expected, len(values)]
    assert histogram.sum == pytest.approx(sum(values))


def test_a_value_equal_to_a_bound_is_in_its_bucket() -> None:
    histogram = Histogram((1, 2))
    histogram.observe(1, times=3)
    assert histogram.snapshot().counts == [3, 0, 0]


def test_a_roofline_of_a_known_model() -> None:
    """SmolLM2-135M has 134,515,008 parameters, including 60 × 576 and 576 of norms. Its head is its embedding."""
    model = replace(
        TINY, vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64,
    )  # fmt: skip
    roofline = Roofline.of(model, weight_bytes=2, kv_value_bytes=2)
    assert roofline.layer_parameters + roofline.head_parameters == 134_515_008 - 61 * 576
    assert roofline.kv_token_bytes == 2 * 30 * 3 * 64 * 2
    cost = roofline.cost(BatchShape(1, 0, 1000, 0, 1000, 1))
    assert cost.decode_flops == 2 * (134_515_008 - 61 * 576) + 4 * 1000 * 30 * 576
    assert cost.bytes_read == 2 * (134_515_008 - 61 * 576) + 1000 * roofline.kv_token_bytes
    assert (cost.prefill_flops, cost.bytes_written) == (0, roofline.kv_token_bytes)
