"""The catalog of the engine's metrics, which worker and gateway share. Imports neither torch nor Prometheus.

Metrics that vLLM also has use vLLM's names, so that its dashboards work. Names with `millrace_` are additional. Names
are those of the Prometheus text format; a counter's name has no `_total`. docs/reference/metrics.md
contains the help texts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

FLOPS = "vllm:estimated_flops_per_gpu"
BYTES_READ = "vllm:estimated_read_bytes_per_gpu"
BYTES_WRITTEN = "vllm:estimated_write_bytes_per_gpu"
PROMPT_TOKENS = "vllm:prompt_tokens"
GENERATION_TOKENS = "vllm:generation_tokens"
CACHE_QUERIES = "vllm:prefix_cache_queries"
CACHE_HITS = "vllm:prefix_cache_hits"
PREEMPTIONS = "vllm:num_preemptions"
DRAFTS = "vllm:spec_decode_num_drafts"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens"
ACCEPTED_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
DRAFT_DEPTHS = "millrace_draft_depth"
FORCED_TOKENS = "millrace_forced_tokens"
SUCCESS = "vllm:request_success"
REQUEST_ERRORS = "millrace_request_errors"
MISSES = "millrace_prefix_cache_misses"
BILLED_TOKENS = "millrace_engine_tokens"
COMPUTED_TOKENS = "millrace_computed_tokens"
BATCHED_SEQUENCES = "millrace_batched_sequences"
ATTENTION_STEPS = "millrace_attention_steps"
ATTENTION_FALLBACKS = "millrace_attention_fallbacks"
STEP_SECONDS = "millrace_step_phase_seconds"
FORWARD_SECONDS = "millrace_forward_seconds"
UPSTREAM_WAITS = "millrace_upstream_waits"
UPSTREAM_REQUESTS_LEFT = "millrace_upstream_requests_left"
UPSTREAM_TOKENS_LEFT = "millrace_upstream_tokens_left"
UPSTREAM_CIRCUIT_OPEN = "millrace_upstream_circuit_open"
UPSTREAM_TENANTS_PAUSED = "millrace_upstream_tenants_paused"

PEAK_FLOPS = "millrace_peak_flops"
PEAK_BANDWIDTH = "millrace_peak_bandwidth_bytes"
MFU = "millrace_mfu_ratio"
BANDWIDTH_USE = "millrace_bandwidth_ratio"

TTFT = "vllm:time_to_first_token_seconds"
ITL = "vllm:inter_token_latency_seconds"
TPOT = "vllm:request_time_per_output_token_seconds"
E2E = "vllm:e2e_request_latency_seconds"
QUEUE_TIME = "vllm:request_queue_time_seconds"
INFERENCE_TIME = "vllm:request_inference_time_seconds"
PREFILL_TIME = "vllm:request_prefill_time_seconds"
DECODE_TIME = "vllm:request_decode_time_seconds"
ITERATION_TOKENS = "vllm:iteration_tokens_total"
REQUEST_PROMPT = "vllm:request_prompt_tokens"
REQUEST_GENERATION = "vllm:request_generation_tokens"
REQUEST_COMPUTED = "vllm:request_prefill_kv_computed_tokens"
STEP_DURATION = "millrace_step_duration_seconds"

_LATENCIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 30, 60, 120, 300, 600)
_GAPS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_STEP_TOKENS = tuple(2**i for i in range(15))


@dataclass(frozen=True, slots=True)
class Family:
    """The declaration of one metric: its help, its label other than model and replica, and a histogram's bucket
    bounds."""

    name: str
    help: str
    label: str = ""
    buckets: tuple[float, ...] = ()


COUNTERS = (
    Family(PROMPT_TOKENS, "prompt tokens of started requests, including cached tokens"),
    Family(GENERATION_TOKENS, "tokens generated"),
    Family(CACHE_QUERIES, "prompt tokens looked up in the prefix cache"),
    Family(
        CACHE_HITS,
        "looked-up prompt tokens found in the prefix cache; the last block of a fully cached prompt is recomputed",
    ),
    Family(PREEMPTIONS, "preemptions"),
    Family(DRAFTS, "steps of a sequence in which drafts were verified"),
    Family(DRAFT_TOKENS, "draft tokens verified, by drafter", "drafter"),
    Family(ACCEPTED_TOKENS, "draft tokens accepted, by drafter", "drafter"),
    Family(ACCEPTED_BY_POSITION, "draft tokens accepted, by position in the draft", "position"),
    Family(DRAFT_DEPTHS, "steps of sequences that may have drafts, by number of draft tokens", "depth"),
    Family(FORCED_TOKENS, "output tokens that a grammar forced, without a forward pass"),
    Family(SUCCESS, "finished requests: stop, length, abort (cancelled) or error", "finished_reason"),
    Family(FLOPS, "floating-point operations that the model requires"),
    Family(BYTES_READ, "bytes read: the weights once per step, and the keys and values attended to"),
    Family(BYTES_WRITTEN, "bytes written: keys and values"),
    Family(REQUEST_ERRORS, "requests ended by an error", "code"),
    Family(
        MISSES,
        "requests with a partial or full cache miss: too_short, first_use, expired_or_evicted or prefix_changed;"
        " a replica cannot detect other_worker",
        "reason",
    ),
    Family(BILLED_TOKENS, "tokens of finished requests without errors, by billing class", "token_class"),
    Family(COMPUTED_TOKENS, "tokens computed: prefill and decode", "phase"),
    Family(BATCHED_SEQUENCES, "sequences in all steps; divided by the number of steps, the mean batch size"),
    Family(ATTENTION_STEPS, "steps computed, by attention backend", "backend"),
    Family(ATTENTION_FALLBACKS, "loads that did not use the default attention backend, by reason", "reason"),
    Family(STEP_SECONDS, "time of the steps: schedule, forward and output", "phase"),
    Family(FORWARD_SECONDS, "time of the forward passes, divided into prefill and decode", "phase"),
    Family(
        UPSTREAM_WAITS,
        "requests that had to wait for their upstream credential: retry_after, requests, tokens or concurrency",
        "reason",
    ),
)
GAUGES = (
    Family(
        PEAK_FLOPS, "operations per second in floating point: of a large product at start, or of the engine if higher"
    ),
    Family(PEAK_BANDWIDTH, "bytes per second, read and written: of a large copy at start, or of the engine if higher"),
    Family(MFU, "model FLOPs utilization during the last 512 steps' forward passes"),
    Family(BANDWIDTH_USE, "bandwidth utilization during the same passes"),
    Family(UPSTREAM_REQUESTS_LEFT, "requests that the upstream's rate limit allows now, by its last headers"),
    Family(UPSTREAM_TOKENS_LEFT, "tokens that the upstream's rate limit allows now, by its last headers"),
    Family(UPSTREAM_CIRCUIT_OPEN, "1 while requests of all tenants are rejected, since the upstream has failed"),
    Family(UPSTREAM_TENANTS_PAUSED, "tenants and own credentials that are paused, since their last requests failed"),
)
HISTOGRAMS = (
    Family(TTFT, "from a request's arrival at the worker to its first token", buckets=_LATENCIES),
    Family(ITL, "time from one token of a completion to the next; includes the wait of a preemption", buckets=_GAPS),
    Family(TPOT, "mean time between the tokens of a request", buckets=_GAPS),
    Family(E2E, "from a request's arrival at the worker to its end", buckets=_LATENCIES),
    Family(
        QUEUE_TIME,
        "from a request's arrival at the worker to its first step, or to its end if it never started",
        buckets=_LATENCIES,
    ),
    Family(INFERENCE_TIME, "from a request's first step to its end", buckets=_LATENCIES),
    Family(PREFILL_TIME, "from a request's first step to its first token", buckets=_LATENCIES),
    Family(DECODE_TIME, "from a request's first token to its end", buckets=_LATENCIES),
    Family(ITERATION_TOKENS, "tokens computed in a step; its _count is the number of steps", buckets=_STEP_TOKENS),
    Family(REQUEST_PROMPT, "prompt tokens of a request", buckets=_TOKENS),
    Family(REQUEST_GENERATION, "tokens generated for a request, in all its completions", buckets=_TOKENS),
    Family(REQUEST_COMPUTED, "prompt tokens of a request that were not found in the prefix cache", buckets=_TOKENS),
    Family(STEP_DURATION, "from the end of the previous step, or the start of a step, to its end", buckets=_GAPS),
)


class Histogram:
    """A histogram with fixed buckets."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)  # inclusive upper ends, increasing
        self.counts = [0] * (len(self.bounds) + 1)  # the last one: above all bounds
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self.counts.copy(), self.sum)


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """The state of a histogram: the number of observations in each bucket."""

    counts: list[int]
    sum: float

    def cumulative(self) -> list[int]:
        """Return the cumulative counts as Prometheus expects them; the last one is the total."""
        return list(accumulate(self.counts))


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """All values of an engine since its start, by metric name and, for counters, by label ("" without one)."""

    counters: dict[str, dict[str, float]]
    gauges: dict[str, float]
    histograms: dict[str, HistogramSnapshot]
