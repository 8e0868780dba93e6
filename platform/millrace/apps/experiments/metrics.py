"""The metrics of experiments: their intervals, what is better, and when an arm does harm. Does not import Django."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from millrace.apps.experiments import statistics
from millrace.apps.experiments.statistics import Interval, Moments

ALPHA = 0.05  # error probability of an interval at all times together, and of all stops of an experiment together
MIN_UNITS = 100  # units in each arm before an interval is computed
LOG_SCALE = 1_000_000  # logarithms are stored in millionths

ChangeResult = Literal["waiting", "better", "worse", "harm", "within", "unclear"]


@dataclass(frozen=True)
class Metric:
    """A metric. Changes of a `log` or `ratio` metric are relative, those of a `share` in parts of 1."""

    name: str
    label: str
    kind: Literal["log", "ratio", "share", "quotient"]
    is_lower_better: bool

    @property
    def is_relative(self) -> bool:
        return self.kind in ("log", "ratio")

    def change(self, control: Moments, treatment: Moments, alpha: float = ALPHA) -> Interval | None:
        """Return the change from control to treatment; None if it cannot be computed."""
        if np.any(np.minimum(control.units, treatment.units) < 2) or not control.w or not treatment.w:
            return None
        return self.interval(control, treatment, alpha)

    def interval(self, control: Moments, treatment: Moments, alpha: float) -> Interval | None:
        """Return the interval, also of arrays."""
        if self.kind == "ratio":
            found = statistics.log_ratio(control, treatment, alpha)
        elif self.kind == "share":
            found = statistics.proportions(control, treatment, alpha)
        else:
            found = statistics.difference(control, treatment, alpha)
        if found is None or not self.is_relative:
            return found
        scale = LOG_SCALE if self.kind == "log" and isinstance(control.x, int) else 1
        return Interval(*(np.expm1(value / scale) for value in (found.estimate, found.low, found.high)))

    def value(self, arm: Moments) -> float | None:
        """Return the estimate of an arm: of a `log` metric the geometric mean."""
        found = statistics.mean(arm)
        return math.exp(found / LOG_SCALE) if self.kind == "log" and found is not None else found

    def does_harm(self, interval: Interval, allowed: float) -> Any:
        """Return whether the change is certainly worse than the guardrail allows."""
        return interval.low > allowed if self.is_lower_better else interval.high < -allowed

    def is_within(self, interval: Interval, allowed: float) -> bool:
        """Return whether the change is certainly not worse than the guardrail allows."""
        return bool(interval.high <= allowed if self.is_lower_better else interval.low >= -allowed)

    def result(self, interval: Interval | None, allowed: float | None) -> ChangeResult:
        if interval is None:
            return "waiting"
        if allowed is not None and self.does_harm(interval, allowed):
            return "harm"
        if self.does_harm(interval, 0.0):
            return "worse"
        if (interval.high < 0) if self.is_lower_better else (interval.low > 0):
            return "better"
        return "within" if allowed is not None and self.is_within(interval, allowed) else "unclear"


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("cost", "Cost per 1,000 requests", "ratio", True),
        Metric("ttft", "Time to first token", "log", True),
        Metric("itl", "Inter-token latency", "log", True),
        Metric("success", "Success rate", "share", False),
        Metric("cache_hit", "Cached prompt tokens", "quotient", False),
    )
}


def stop_alpha(guardrails: int, treatments: int) -> float:
    """Return the error probability of one stop check, so that all of them together have ALPHA (Bonferroni)."""
    return ALPHA / max(1, guardrails * treatments)
