"""Telemetry of the engine. The clock is the test's, so every value is exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.contract import metric_families as families
from inference_worker.contract.config import EngineConfig
from inference_worker.contract.metric_families import Histogram
from inference_worker.contract.request import ServiceClass, TokenUsage
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.telemetry.roofline import BatchShape, Peaks, Roofline
from inference_worker.engine.telemetry.telemetry import EngineMetrics, StepSeconds
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


def test_a_requests_record_is_exact() -> None:
    bench = Bench(max_num_batched_tokens=20, max_num_seqs=4)
    bench.clock.now = 5
    bench.engine.add_request(request("x", 32, max_tokens=3, tenant="t", service_class=ServiceClass.FLEX))
    bench.clock.now = 7
    for took in (2, 2, 3, 1):  # a chunk of 20 tokens, one of 12 and the first token, two more
        bench.step(took)
    [record] = bench.engine.recent_requests()
    assert (record.request_id, record.tenant, record.service_class) == ("x", "t", ServiceClass.FLEX)
    assert (record.finish_reason, record.error_code) == ("length", None)
    assert (record.arrived_at, record.queue_seconds, record.prefill_seconds, record.ttft_seconds) == (5, 2, 4, 6)
    assert (record.mean_itl_seconds, record.max_itl_seconds) == (2, 3)
    assert (record.decode_seconds, record.e2e_seconds) == (4, 10)
    assert (record.usage, record.cached_tokens) == (TokenUsage(uncached=32, output=3), 0)
    assert (record.miss, record.preemptions, record.steps) == ("first_use", 0, 4)


def test_the_same_times_are_in_the_histograms() -> None:
    bench = Bench(max_num_batched_tokens=20, max_num_seqs=4)
    bench.engine.add_request(request("x", 32, max_tokens=3))
    bench.clock.now = 2
    for took in (2, 2, 3, 1):
        bench.step(took)
    observed = {name: count(bench.metrics, name) for name in bench.metrics.snapshot().histograms}
    assert observed == {
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


def test_the_arrival_is_the_requests_time_but_not_in_the_future() -> None:
    bench = Bench()
    bench.clock.now = 10
    for name, arrival in (("early", 4.0), ("unsaid", 0.0), ("later", 99.0)):
        bench.engine.add_request(request(name, distinct(16, len(name)), arrival=arrival))
    run(bench.engine)
    arrived = {r.request_id: r.arrived_at for r in bench.engine.recent_requests()}
    assert arrived == {"early": 4, "unsaid": 10, "later": 10}


def test_cached_tokens_and_billed_tokens_are_counted_separately() -> None:
    bench = Bench()
    for name in ("first", "again"):
        bench.engine.add_request(request(name, 32))
        run(bench.engine)
    again = bench.engine.recent_requests()[1]
    assert again.usage == TokenUsage(cache_read=32, output=1)
    assert (again.cached_tokens, again.miss) == (16, None)  # the last block is computed again, for its logits
    assert counter(bench.metrics, families.CACHE_QUERIES) == 64
    assert counter(bench.metrics, families.CACHE_HITS) == 16
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
    for name, prompt in (("done", 16), ("cancelled", 16), ("broken", 16)):
        bench.engine.add_request(request(name, distinct(prompt, len(name)), max_tokens=2))
        if name == "cancelled":
            bench.step(1)
            bench.engine.abort(name)
        if name == "broken":
            bench.runner.choose = lambda _: 1 // 0
        run(bench.engine)
    counters = bench.metrics.snapshot().counters
    assert counters[families.SUCCESS] == {"stop": 0, "length": 1, "abort": 1, "error": 1}
    assert counters[families.REQUEST_ERRORS] == {"internal_error": 1}
    assert counters[families.BILLED_TOKENS] == {
        "uncached": 32, "cache_read": 0, "cache_write_5m": 0, "cache_write_1h": 0, "output": 3
    }  # fmt: skip
    assert [(r.finish_reason, r.error_code) for r in bench.engine.recent_requests()] == [
        ("length", None), ("cancelled", None), (None, "internal_error")
    ]  # fmt: skip


def test_a_request_that_never_started_has_only_waiting_time() -> None:
    bench = Bench()
    bench.engine.add_request(request("x", 16))
    bench.clock.now = 3
    bench.engine.abort("x")
    [record] = bench.engine.recent_requests()
    assert (record.queue_seconds, record.e2e_seconds) == (3, 3)
    assert (record.prefill_seconds, record.ttft_seconds, record.decode_seconds, record.mean_itl_seconds) == (None,) * 4
    assert record.usage == TokenUsage()
    assert count(bench.metrics, families.QUEUE_TIME) == (1, 3)
    assert count(bench.metrics, families.PREFILL_TIME) == count(bench.metrics, families.REQUEST_PROMPT) == (0, 0)


def test_several_choices_are_one_request() -> None:
    bench = Bench()
    bench.engine.add_request(request("x", 20, n=2, max_tokens=2))
    for took in (1, 2, 4):  # the prompt and the first's token; the first's end, the second's begin; its end
        bench.step(took)
    [record] = bench.engine.recent_requests()
    assert (record.ttft_seconds, record.mean_itl_seconds, record.max_itl_seconds) == (1, 3, 4)
    assert (record.usage.output, record.steps, record.e2e_seconds) == (4, 4, 7)
    assert count(bench.metrics, families.TTFT) == (1, 1)


def test_preemptions_are_counted_and_their_wait_is_inter_token_latency() -> None:
    bench = Bench(num_blocks=4, max_num_seqs=2)
    bench.engine.add_request(request("a", distinct(30, 1), max_tokens=20))
    bench.engine.add_request(request("b", distinct(15, 2), max_tokens=20))
    run(bench.engine)
    records = {r.request_id: r for r in bench.engine.recent_requests()}
    preempted = [r for r in records.values() if r.preemptions]
    assert [r.request_id for r in preempted] == ["b"]
    assert preempted[0].max_itl_seconds is not None
    assert preempted[0].max_itl_seconds > 1 == records["a"].max_itl_seconds
    assert counter(bench.metrics, families.PREEMPTIONS) == sum(r.preemptions for r in preempted)


def test_a_steps_record_is_exact() -> None:
    bench = Bench(max_num_batched_tokens=20, max_num_seqs=4)
    bench.engine.add_request(request("a", distinct(18, 1), max_tokens=9))
    bench.step(1)
    bench.engine.add_request(request("b", distinct(40, 2), max_tokens=9))
    bench.step(1)
    first, mixed = bench.engine.recent_steps()
    assert (first.sequences, first.decodes, first.prefill_tokens, first.tokens) == (1, 0, 18, 18)
    assert first.cost.prefill_flops == LAYER * 18 + HEAD + PAIR * (18 * 19 // 2)
    assert first.cost.bytes_read == 4 * (448 + 8000) + KV * 18
    assert (first.prefill_seconds, first.decode_seconds) == (1, 0)

    # One decode with a context of 19, and the first 19 tokens of b's prompt, which sample no token yet.
    assert (mixed.sequences, mixed.decodes, mixed.prefill_tokens) == (2, 1, 19)
    assert (mixed.running, mixed.waiting, mixed.kv_blocks, mixed.kv_blocks_used) == (2, 0, 20, 4)
    decode, prefill = LAYER + HEAD + PAIR * 19, LAYER * 19 + PAIR * (19 * 20 // 2)
    assert (mixed.cost.decode_flops, mixed.cost.prefill_flops) == (decode, prefill)
    assert (mixed.cost.bytes_read, mixed.cost.bytes_written) == (4 * 8448 + KV * 38, KV * 20)
    assert mixed.seconds == StepSeconds(1, 1, 1, 3)
    assert mixed.prefill_seconds == pytest.approx(prefill / (prefill + decode))
    assert mixed.mfu == pytest.approx((prefill + decode) / 1e6)
    assert mixed.bandwidth_use == pytest.approx((4 * 8448 + KV * 58) / 1e5)

    counters = bench.metrics.snapshot().counters
    assert counters[families.COMPUTED_TOKENS] == {"prefill": 37, "decode": 1}
    assert counters[families.STEP_SECONDS] == {"schedule": 2, "forward": 2, "output": 2}
    assert counters[families.FORWARD_SECONDS]["prefill"] == pytest.approx(1 + mixed.prefill_seconds)
    assert counters[families.FORWARD_SECONDS]["decode"] == pytest.approx(mixed.decode_seconds)
    assert counters[families.FLOPS][""] == sum(s.cost.prefill_flops + s.cost.decode_flops for s in (first, mixed))
    assert counters[families.BYTES_WRITTEN][""] == KV * 38


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
    metrics = EngineMetrics(bench.engine.scheduler, bench.runner.roofline, max_records=2)
    bench.engine.metrics = metrics
    for index, prompt in enumerate((64, 16, 32)):
        bench.engine.add_request(request(str(index), distinct(prompt, index + 1)))
        run(bench.engine)
    kept = metrics.steps()
    assert [record.prefill_tokens for record in kept] == [16, 32]
    assert [record.request_id for record in metrics.requests()] == ["1", "2"]
    flops = sum(record.cost.prefill_flops for record in kept)
    assert metrics.snapshot().gauges[families.MFU] == pytest.approx(flops / 2 / 1e6)
    moved = sum(record.cost.bytes_read + record.cost.bytes_written for record in kept)
    assert metrics.snapshot().gauges[families.BANDWIDTH_USE] == pytest.approx(moved / 2 / 1e5)
    assert metrics.snapshot().gauges[families.PEAK_FLOPS] == 1e6


def test_an_unmeasured_device_has_no_utilization() -> None:
    bench = Bench()
    bench.engine.metrics = EngineMetrics(bench.engine.scheduler, replace(bench.runner.roofline, peaks=None))
    bench.engine.add_request(request("x", 16))
    run(bench.engine)
    assert set(bench.metrics.snapshot().gauges.values()) == {0.0}


def test_a_snapshot_has_all_families_and_does_not_change() -> None:
    bench = Bench()
    before = bench.metrics.snapshot()
    bench.engine.add_request(request("x", 16, max_tokens=3))
    run(bench.engine)
    for told, known in (
        (before.counters, families.COUNTERS),
        (before.gauges, families.GAUGES),
        (before.histograms, families.HISTOGRAMS),
    ):
        assert list(told) == [family.name for family in known]
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
