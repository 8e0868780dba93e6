"""The engine's metrics. Does not import torch.

Times of requests are the engine's clock. Separate prefill and decode times of a step are an estimate, because one
forward pass computes both: its time is divided in proportion to their floating-point operations.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

from inference_worker.contract import metric_families as families
from inference_worker.contract.metric_families import Histogram, MetricsSnapshot
from inference_worker.contract.request import TOKEN_CLASSES, RequestOutput
from inference_worker.engine.capacity.roofline import BatchShape, Peaks, Roofline, StepCost
from inference_worker.engine.speculation.speculator import DraftCounts, Speculator

if TYPE_CHECKING:
    from inference_worker.engine.attention.base import BackendChoice
    from inference_worker.engine.scheduling.scheduler import Scheduler
    from inference_worker.engine.sequences.sequence import RequestGroup, Sequence
    from inference_worker.engine.sequences.step import SchedulerOutput

MAX_RECENT_STEPS = 512  # MFU and bandwidth use are averages of these

# vLLM's finish reasons; its dashboards group by them.
_FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort"}


class StepSeconds(NamedTuple):
    """The duration of a step and of its parts. With asynchronous scheduling, parts of several steps overlap."""

    schedule: float
    forward: float
    output: float
    total: float  # without the time before the previous step's end


class _RecentStep(NamedTuple):
    """What MFU and bandwidth use need of a step."""

    forward_seconds: float
    flops: int
    moved_bytes: int


class EngineMetrics:
    """The metrics of one engine.

    Only the engine's thread writes. Any thread may call `snapshot`. Each returned number was correct at some moment of
    the call, and counters never decrease.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        roofline: Roofline,
        attention: BackendChoice,
        *,
        speculator: Speculator | None = None,
        max_recent_steps: int = MAX_RECENT_STEPS,
    ) -> None:
        self._scheduler = scheduler
        self._speculator = speculator
        self._attention = attention
        self._roofline = roofline
        self._peaks = roofline.peaks
        self._recent: deque[_RecentStep] = deque(maxlen=max_recent_steps)
        self._histograms = {family.name: Histogram(family.buckets) for family in families.HISTOGRAMS}
        self._ttft, self._itl = self._histograms[families.TTFT], self._histograms[families.ITL]
        self._iteration = self._histograms[families.ITERATION_TOKENS]
        self._duration = self._histograms[families.STEP_DURATION]
        self._gaps: list[float] = []  # seconds between tokens in the current step
        self._recent_forward = 0.0  # seconds of the recent steps
        self._recent_flops = self._recent_bytes = 0  # sums over the recent steps
        self._finished = dict.fromkeys((*_FINISHED.values(), "error"), 0)
        self._errors: dict[str, int] = {}
        self._misses: dict[str, int] = {}
        self._billed = dict.fromkeys(TOKEN_CLASSES, 0)
        self._queries = self._hits = 0
        self._flops = self._bytes_read = self._bytes_written = 0
        self._prefill_tokens = self._decode_tokens = 0
        self._prefill_seconds = self._decode_seconds = 0.0
        self.steps_done = self.batched_sequences = self.batched_tokens = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = self.forced_tokens = 0
        self.schedule_seconds = self.forward_seconds = self.output_seconds = 0.0

    def record_arrival(self, group: RequestGroup, now: float) -> None:
        """Record the arrival of a request, at its arrival time or now."""
        arrival = group.request.arrival
        group.arrived_at = arrival if 0 < arrival < now else now

    def tokens(self, seq: Sequence, count: int, now: float) -> None:
        """Record `count` new tokens of `seq`, which one step has returned. There is no gap between them."""
        timeline, group = seq.timeline, seq.group
        self.output_tokens += count
        if timeline.last_token_at is not None:
            gap = now - timeline.last_token_at
            timeline.gaps += 1
            timeline.gap_sum += gap
            self._gaps.append(gap)
        elif group.first_token_at is None:
            group.first_token_at = now
            self._ttft.observe(now - group.arrived_at)
        timeline.last_token_at = now
        timeline.gaps += count - 1
        self._gaps += [0.0] * (count - 1)

    def record_schedule(self, batch: SchedulerOutput) -> BatchShape:
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
        if len(self._recent) == self._recent.maxlen:
            oldest = self._recent[0]
            self._recent_forward -= oldest.forward_seconds
            self._recent_flops -= oldest.flops
            self._recent_bytes -= oldest.moved_bytes
        self._recent_forward += seconds.forward
        self._recent_flops += flops
        self._recent_bytes += moved
        self._recent.append(_RecentStep(seconds.forward, flops, moved))

    def record_end(self, group: RequestGroup, output: RequestOutput, now: float) -> None:
        """Record the end of a request with its last output."""
        usage, begun, first = group.usage(), group.scheduled_at, group.first_token_at
        if output.error is None:
            self._finished[_FINISHED[output.finish_reason or "cancelled"]] += 1
            for token_class in TOKEN_CLASSES:
                self._billed[token_class] += getattr(usage, token_class)
        else:
            self._finished["error"] += 1
            self._errors[output.error.code] = self._errors.get(output.error.code, 0) + 1
        self._observe(families.E2E, now - group.arrived_at)
        self._observe(families.QUEUE_TIME, (now if begun is None else begun) - group.arrived_at)
        if begun is None:
            return
        self._observe(families.INFERENCE_TIME, now - begun)
        if first is not None:
            self._observe(families.PREFILL_TIME, first - begun)
            self._observe(families.DECODE_TIME, now - first)
        timelines = [seq.timeline for seq in group.sequences]
        if gaps := sum(timeline.gaps for timeline in timelines):
            self._observe(families.TPOT, sum(timeline.gap_sum for timeline in timelines) / gaps)
        self._observe(families.REQUEST_PROMPT, usage.prompt)
        self._observe(families.REQUEST_GENERATION, usage.output)
        self._observe(families.REQUEST_COMPUTED, usage.prompt - group.reused_tokens)

    def snapshot(self) -> MetricsSnapshot:
        """Return all values."""
        forward, peaks = self._recent_forward, self._peaks
        flops = moved = 0.0  # operations and bytes per second
        if forward > 0:
            flops, moved = self._recent_flops / forward, self._recent_bytes / forward
        if peaks:
            # Other processes may have slowed the measurement at start.
            peaks = self._peaks = Peaks(max(peaks.flops, flops), max(peaks.bandwidth, moved))
        return MetricsSnapshot(
            counters=self._counters(),
            gauges={
                families.PEAK_FLOPS: peaks.flops if peaks else 0.0,
                families.PEAK_BANDWIDTH: peaks.bandwidth if peaks else 0.0,
                families.MFU: flops / peaks.flops if peaks else 0.0,
                families.BANDWIDTH_USE: moved / peaks.bandwidth if peaks else 0.0,
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
            **self._draft_counters(),
            families.SUCCESS: dict(self._finished),
            families.FLOPS: {"": self._flops},
            families.BYTES_READ: {"": self._bytes_read},
            families.BYTES_WRITTEN: {"": self._bytes_written},
            families.REQUEST_ERRORS: dict(self._errors),
            families.MISSES: dict(self._misses),
            families.BILLED_TOKENS: dict(self._billed),
            families.COMPUTED_TOKENS: {"prefill": self._prefill_tokens, "decode": self._decode_tokens},
            families.BATCHED_SEQUENCES: {"": self.batched_sequences},
            families.ATTENTION_STEPS: {self._attention.name: self.steps_done},
            families.ATTENTION_FALLBACKS: {self._attention.fallback: 1} if self._attention.fallback else {},
            families.STEP_SECONDS: {
                "schedule": self.schedule_seconds,
                "forward": self.forward_seconds,
                "output": self.output_seconds,
            },
            families.FORWARD_SECONDS: {"prefill": self._prefill_seconds, "decode": self._decode_seconds},
        }

    def _draft_counters(self) -> dict[str, dict[str, float]]:
        counts = DraftCounts() if self._speculator is None else self._speculator.counts
        depths = {depth: number for depth, number in list(enumerate(counts.depths)) if number}
        return {
            families.DRAFTS: {"": sum(number for depth, number in depths.items() if depth)},
            families.DRAFT_TOKENS: dict(counts.verified),
            families.ACCEPTED_TOKENS: dict(counts.accepted),
            families.ACCEPTED_BY_POSITION: {
                str(position): number for position, number in enumerate(list(counts.accepted_at)) if number
            },
            families.DRAFT_DEPTHS: {str(depth): number for depth, number in depths.items()},
            families.FORCED_TOKENS: {"": self.forced_tokens},
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

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)


def _shape(batch: SchedulerOutput) -> BatchShape:
    """Return the counts of the batch. Verified drafts count as decodes."""
    decodes = prefill_tokens = decode_pairs = prefill_pairs = kv_tokens = samples = 0
    for scheduled in batch.scheduled:
        count, start = scheduled.num_new_tokens, scheduled.start
        kv_tokens += start + count
        samples += scheduled.num_samples
        if count == 1 + len(scheduled.drafts):
            decodes += count
            decode_pairs += count * start + count * (count + 1) // 2
        else:
            prefill_tokens += count
            prefill_pairs += count * start + count * (count + 1) // 2
    return BatchShape(decodes, prefill_tokens, decode_pairs, prefill_pairs, kv_tokens, samples)
