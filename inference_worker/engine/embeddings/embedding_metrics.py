"""The metrics of an embedding engine: those engine metrics that apply without generation and cache."""

from __future__ import annotations

from inference_worker.contract import metric_families as families
from inference_worker.contract.metric_families import Histogram, MetricsSnapshot
from inference_worker.contract.request import RequestOutput, TokenCounts
from inference_worker.engine.sequences.sequence import RequestGroup

_FINISHED = {"stop": "stop", "cancelled": "abort"}  # vLLM's words
_HISTOGRAMS = (
    families.E2E,
    families.QUEUE_TIME,
    families.INFERENCE_TIME,
    families.ITERATION_TOKENS,
    families.REQUEST_PROMPT,
    families.STEP_DURATION,
)


class EmbeddingMetrics:
    """The counters of an embedding engine. Only the engine's thread writes; any thread may call `snapshot`."""

    def __init__(self) -> None:
        self._histograms = {f.name: Histogram(f.buckets) for f in families.HISTOGRAMS if f.name in _HISTOGRAMS}
        self._finished = dict.fromkeys((*_FINISHED.values(), "error"), 0)
        self._errors: dict[str, int] = {}
        self._billed = 0
        self.steps = self.inputs = self.tokens = 0
        self.schedule_seconds = self.forward_seconds = self.output_seconds = 0.0

    def step(self, inputs: int, tokens: int, schedule: float, forward: float, output: float) -> None:
        """Record a successful step and the seconds of its parts."""
        self.steps += 1
        self.inputs += inputs
        self.tokens += tokens
        self.schedule_seconds += schedule
        self.forward_seconds += forward
        self.output_seconds += output
        self._histograms[families.ITERATION_TOKENS].observe(tokens)
        self._histograms[families.STEP_DURATION].observe(schedule + forward + output)

    def record_end(self, group: RequestGroup, output: RequestOutput, now: float) -> None:
        """Record a request that ended with `output`."""
        usage = output.usage or TokenCounts()
        if output.error is not None:
            self._finished["error"] += 1
            self._errors[output.error.code] = self._errors.get(output.error.code, 0) + 1
        else:
            self._finished[_FINISHED[output.finish_reason or "cancelled"]] += 1
            self._billed += usage.uncached
        begun = now if group.scheduled_at is None else group.scheduled_at
        self._histograms[families.E2E].observe(now - group.arrived_at)
        self._histograms[families.QUEUE_TIME].observe(begun - group.arrived_at)
        if group.scheduled_at is not None:
            self._histograms[families.INFERENCE_TIME].observe(now - begun)
            self._histograms[families.REQUEST_PROMPT].observe(usage.prompt)

    def snapshot(self) -> MetricsSnapshot:
        """Return all values."""
        seconds = {"schedule": self.schedule_seconds, "forward": self.forward_seconds, "output": self.output_seconds}
        return MetricsSnapshot(
            counters={
                families.PROMPT_TOKENS: {"": self.tokens},
                families.SUCCESS: dict(self._finished),
                families.REQUEST_ERRORS: dict(self._errors),
                families.BILLED_TOKENS: {"uncached": self._billed},
                families.COMPUTED_TOKENS: {"prefill": self.tokens},
                families.BATCHED_SEQUENCES: {"": self.inputs},
                families.STEP_SECONDS: seconds,
                families.FORWARD_SECONDS: {"prefill": self.forward_seconds},
            },
            gauges={},
            histograms={name: histogram.snapshot() for name, histogram in self._histograms.items()},
        )
