"""The engine's telemetry: records of requests and steps, and cumulative metrics. Does not import torch.

Times of requests are the engine's clock. Separate prefill and decode times of a step are an estimate, because one
forward
pass computes both: its time is divided in proportion to their floating-point operations.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from inference_worker.contract import metric_families as families
from inference_worker.contract.metric_families import Histogram, MetricsSnapshot
from inference_worker.contract.request import (
    TOKEN_CLASSES,
    FinishReason,
    MissReason,
    RequestOutput,
    ServiceClass,
    TokenUsage,
)
from inference_worker.engine.telemetry.roofline import BatchShape, Roofline, StepCost

if TYPE_CHECKING:
    from inference_worker.engine.scheduling.scheduler import Scheduler, SchedulerOutput
    from inference_worker.engine.scheduling.sequence import RequestGroup, Sequence, Timeline

MAX_RECORDS = 512  # of the last requests and steps; MFU and bandwidth use are averages of these steps

# vLLM's finish reasons; its dashboards group by them.
_FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort"}


@dataclass(frozen=True, slots=True)
class EngineRequestRecord:
    """One request with all its sequences, from its arrival to its end. Durations are in seconds."""

    request_id: str
    tenant: str
    service_class: ServiceClass
    finish_reason: FinishReason | None  # of the sequence that ended last; None: the request failed
    error_code: str | None
    arrived_at: float  # the engine's clock
    queue_seconds: float  # arrival to first step, or to the end if it never started
    prefill_seconds: float | None  # first step to first token; None without a token
    ttft_seconds: float | None  # arrival to first token
    decode_seconds: float | None  # first token to end
    mean_itl_seconds: float | None  # None: no sequence has two tokens
    max_itl_seconds: float | None
    e2e_seconds: float  # arrival to end
    usage: TokenUsage
    cached_tokens: int  # cached prompt tokens that were not computed; `usage.cache_read` is billed
    miss: MissReason | None
    preemptions: int
    steps: int  # sum over its sequences


class StepSeconds(NamedTuple):
    """The duration of a step and of its parts. With asynchronous scheduling, parts of several steps overlap."""

    schedule: float
    forward: float
    output: float
    total: float  # without the time before the previous step's end


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: its batch, the engine's state after it, and its costs."""

    sequences: int
    decodes: int  # sequences that compute one token
    prefill_tokens: int
    running: int
    waiting: int
    kv_blocks: int
    kv_blocks_used: int
    seconds: StepSeconds
    prefill_seconds: float  # of the forward pass; see the module's docstring
    cost: StepCost
    mfu: float  # share of the device's peak during the forward pass; 0: the peak is not known
    bandwidth_use: float  # the same

    @property
    def decode_seconds(self) -> float:
        return self.seconds.forward - self.prefill_seconds

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decodes


class EngineMetrics:
    """The metrics of one engine, and the records of its last requests and steps.

    Only the engine's thread writes. Any thread may call `snapshot`, `requests` and `steps`. Each returned number was
    correct at
    some moment of the call, and counters never decrease.
    """

    def __init__(self, scheduler: Scheduler, roofline: Roofline, *, max_records: int = MAX_RECORDS) -> None:
        self._scheduler = scheduler
        self._roofline = roofline
        self._requests: deque[EngineRequestRecord] = deque(maxlen=max_records)
        self._steps: deque[StepRecord] = deque(maxlen=max_records)
        self._histograms = {family.name: Histogram(family.buckets) for family in families.HISTOGRAMS}
        self._ttft, self._itl = self._histograms[families.TTFT], self._histograms[families.ITL]
        self._iteration = self._histograms[families.ITERATION_TOKENS]
        self._duration = self._histograms[families.STEP_DURATION]
        self._gaps: list[float] = []  # of the current step
        self._recent_forward = 0.0  # sum over the stored steps, as the next two
        self._recent_flops = self._recent_bytes = 0
        self._finished = dict.fromkeys((*_FINISHED.values(), "error"), 0)
        self._errors: dict[str, int] = {}
        self._misses: dict[str, int] = {}
        self._billed = dict.fromkeys(TOKEN_CLASSES, 0)
        self._queries = self._hits = 0
        self._flops = self._bytes_read = self._bytes_written = 0
        self._prefill_tokens = self._decode_tokens = 0
        self._prefill_seconds = self._decode_seconds = 0.0
        self.steps_done = self.batched_sequences = self.batched_tokens = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.schedule_seconds = self.forward_seconds = self.output_seconds = 0.0

    def arrived(self, group: RequestGroup, now: float) -> None:
        """Record the arrival of a request, at its arrival time or now."""
        arrival = group.request.arrival
        group.arrived_at = arrival if 0 < arrival < now else now

    def token(self, seq: Sequence, now: float) -> None:
        """Record a new token of `seq`."""
        timeline, group = seq.timeline, seq.group
        self.output_tokens += 1
        if timeline.last_token_at is not None:
            gap = now - timeline.last_token_at
            timeline.gaps += 1
            timeline.gap_sum += gap
            if gap > timeline.longest_gap:
                timeline.longest_gap = gap
            self._gaps.append(gap)
        elif group.first_token_at is None:
            group.first_token_at = now
            self._ttft.observe(now - group.arrived_at)
        timeline.last_token_at = now

    def scheduled(self, batch: SchedulerOutput) -> BatchShape:
        """Return the costs of the next step's batch, for `step`."""
        if batch.started:
            self._count_started(batch)
        return _shape(batch)

    def step(self, batch: SchedulerOutput, shape: BatchShape, seconds: StepSeconds) -> None:
        """Record a successful step after its tokens were reported."""
        for gap, times in Counter(self._gaps).items():  # most sequences have the same gap
            self._itl.observe(gap, times)
        self._gaps.clear()
        cost = self._roofline.cost(shape)
        flops = cost.prefill_flops + cost.decode_flops
        moved = cost.bytes_read + cost.bytes_written
        prefill_seconds = seconds.forward * cost.prefill_flops / flops if flops else 0.0
        self._count(batch, shape, cost, seconds, prefill_seconds)
        scheduler = self._scheduler
        pool = scheduler.cache.pool
        record = StepRecord(
            len(batch.scheduled),
            shape.decodes,
            shape.prefill_tokens,
            len(scheduler.running),
            len(scheduler.waiting),
            pool.num_blocks,
            pool.num_held,
            seconds,
            prefill_seconds,
            cost,
            self._roofline.mfu(flops, seconds.forward),
            self._roofline.bandwidth_use(moved, seconds.forward),
        )
        if len(self._steps) == self._steps.maxlen:
            oldest = self._steps[0]
            self._recent_forward -= oldest.seconds.forward
            self._recent_flops -= oldest.cost.prefill_flops + oldest.cost.decode_flops
            self._recent_bytes -= oldest.cost.bytes_read + oldest.cost.bytes_written
        self._recent_forward += seconds.forward
        self._recent_flops += flops
        self._recent_bytes += moved
        self._steps.append(record)

    def finished(self, group: RequestGroup, output: RequestOutput, now: float) -> None:
        """Record the end of a request with its last output."""
        record = _request_record(group, output, now)
        self._requests.append(record)
        if record.error_code is None:
            self._finished[_FINISHED[record.finish_reason or "cancelled"]] += 1
            for token_class in TOKEN_CLASSES:
                self._billed[token_class] += getattr(record.usage, token_class)
        else:
            self._finished["error"] += 1
            self._errors[record.error_code] = self._errors.get(record.error_code, 0) + 1
        self._observe(families.E2E, record.e2e_seconds)
        self._observe(families.QUEUE_TIME, record.queue_seconds)
        if group.scheduled_at is None:
            return
        self._observe(families.INFERENCE_TIME, now - group.scheduled_at)
        self._observe(families.PREFILL_TIME, record.prefill_seconds)
        self._observe(families.DECODE_TIME, record.decode_seconds)
        self._observe(families.TPOT, record.mean_itl_seconds)
        self._observe(families.REQUEST_PROMPT, record.usage.prompt)
        self._observe(families.REQUEST_GENERATION, record.usage.output)
        self._observe(families.REQUEST_COMPUTED, record.usage.prompt - record.cached_tokens)

    def requests(self) -> list[EngineRequestRecord]:
        """Return the last requests that ended, oldest first."""
        return list(self._requests)

    def steps(self) -> list[StepRecord]:
        """Return the last steps, oldest first."""
        return list(self._steps)

    def snapshot(self) -> MetricsSnapshot:
        """Return all values."""
        roofline, forward = self._roofline, self._recent_forward
        peaks = roofline.peaks
        return MetricsSnapshot(
            counters=self._counters(),
            gauges={
                families.PEAK_FLOPS: peaks.flops if peaks else 0.0,
                families.PEAK_BANDWIDTH: peaks.bandwidth if peaks else 0.0,
                families.MFU: roofline.mfu(self._recent_flops, forward),
                families.BANDWIDTH_USE: roofline.bandwidth_use(self._recent_bytes, forward),
            },
            histograms={name: histogram.snapshot() for name, histogram in self._histograms.items()},
        )

    def _counters(self) -> dict[str, dict[str, float]]:
        return {
            families.PROMPT_TOKENS: {"": self.prompt_tokens},
            families.GENERATION_TOKENS: {"": self.output_tokens},
            families.CACHE_QUERIES: {"": self._queries},
            families.CACHE_HITS: {"": self._hits},
            families.PREEMPTIONS: {"": self._scheduler.preemptions},
            families.SUCCESS: dict(self._finished),
            families.FLOPS: {"": self._flops},
            families.BYTES_READ: {"": self._bytes_read},
            families.BYTES_WRITTEN: {"": self._bytes_written},
            families.REQUEST_ERRORS: dict(self._errors),
            families.MISSES: dict(self._misses),
            families.BILLED_TOKENS: dict(self._billed),
            families.COMPUTED_TOKENS: {"prefill": self._prefill_tokens, "decode": self._decode_tokens},
            families.BATCHED_SEQUENCES: {"": self.batched_sequences},
            families.STEP_SECONDS: {
                "schedule": self.schedule_seconds,
                "forward": self.forward_seconds,
                "output": self.output_seconds,
            },
            families.FORWARD_SECONDS: {"prefill": self._prefill_seconds, "decode": self._decode_seconds},
        }

    def _count(
        self, batch: SchedulerOutput, shape: BatchShape, cost: StepCost, seconds: StepSeconds, prefill_seconds: float
    ) -> None:
        self.steps_done += 1
        self.batched_sequences += len(batch.scheduled)
        self.batched_tokens += batch.num_tokens
        self.schedule_seconds += seconds.schedule
        self.forward_seconds += seconds.forward
        self.output_seconds += seconds.output
        self._prefill_seconds += prefill_seconds
        self._decode_seconds += seconds.forward - prefill_seconds
        self._prefill_tokens += shape.prefill_tokens
        self._decode_tokens += shape.decodes
        self._flops += cost.prefill_flops + cost.decode_flops
        self._bytes_read += cost.bytes_read
        self._bytes_written += cost.bytes_written
        self._iteration.observe(batch.num_tokens)
        self._duration.observe(seconds.total)

    def _count_started(self, batch: SchedulerOutput) -> None:
        starts = {scheduled.seq: scheduled.start for scheduled in batch.scheduled}
        for seq in batch.started:
            group = seq.group
            group.reused_tokens = starts[seq]
            self.prompt_tokens += seq.num_prompt_tokens
            self.cached_tokens += seq.cache_read or 0
            if self._scheduler.cache.prefix_cache and seq.params.prompt_logprobs is None:
                self._queries += seq.num_prompt_tokens
                self._hits += group.reused_tokens
            miss = group.cache_report.miss
            if miss is not None:
                self._misses[miss] = self._misses.get(miss, 0) + 1

    def _observe(self, name: str, value: float | None) -> None:
        if value is not None:
            self._histograms[name].observe(value)


def _shape(batch: SchedulerOutput) -> BatchShape:
    """Return the counts of the batch, and count the step for each of its sequences."""
    decodes = prefill_tokens = decode_pairs = prefill_pairs = kv_tokens = samples = 0
    for scheduled in batch.scheduled:
        count, start = scheduled.num_new_tokens, scheduled.start
        scheduled.seq.timeline.steps += 1
        kv_tokens += start + count
        samples += scheduled.samples
        if count == 1:
            decodes += 1
            decode_pairs += start + 1
        else:
            prefill_tokens += count
            prefill_pairs += count * start + count * (count + 1) // 2
    return BatchShape(decodes, prefill_tokens, decode_pairs, prefill_pairs, kv_tokens, samples)


def _request_record(group: RequestGroup, output: RequestOutput, now: float) -> EngineRequestRecord:
    request, begun, first = group.request, group.scheduled_at, group.first_token_at
    timelines: Items[Timeline] = [seq.timeline for seq in group.sequences]
    gaps = sum(t.gaps for t in timelines)
    return EngineRequestRecord(
        request_id=request.request_id,
        tenant=request.tenant,
        service_class=request.service_class,
        finish_reason=output.finish_reason,
        error_code=output.error.code if output.error else None,
        arrived_at=group.arrived_at,
        queue_seconds=(now if begun is None else begun) - group.arrived_at,
        prefill_seconds=None if begun is None or first is None else first - begun,
        ttft_seconds=None if first is None else first - group.arrived_at,
        decode_seconds=None if first is None else now - first,
        mean_itl_seconds=sum(t.gap_sum for t in timelines) / gaps if gaps else None,
        max_itl_seconds=max(t.longest_gap for t in timelines) if gaps else None,
        e2e_seconds=now - group.arrived_at,
        usage=group.usage(),
        cached_tokens=group.reused_tokens,
        miss=group.cache_report.miss,
        preemptions=sum(seq.preemptions for seq in group.sequences),
        steps=sum(t.steps for t in timelines),
    )
