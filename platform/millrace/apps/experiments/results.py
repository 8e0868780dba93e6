"""Results of an experiment: values of each arm, changes with their intervals, the decision and the monthly saving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Literal

from millrace.apps.experiments.counting import REQUESTS
from millrace.apps.experiments.metrics import ALPHA, METRICS, MIN_UNITS, ChangeResult, Metric, stop_alpha
from millrace.apps.experiments.models import ArmTotal, ExperimentPoint
from millrace.apps.experiments.statistics import Interval, Moments, sample_ratio_p
from tenants.models import Experiment
from tenants.routing_policies.experiments import ExperimentArm

SAMPLE_RATIO_ALPHA = 0.01  # below it, the assignment or the log is broken
MONTH = timedelta(days=30)

Decision = Literal["draft", "waiting", "sample_ratio", "harm", "better", "worse", "no_difference", "unclear"]


@dataclass(frozen=True)
class MetricChange:
    """The change of a metric from the control to a treatment."""

    metric: Metric
    control: float | None
    treatment: float | None
    interval: Interval | None
    allowed: float | None  # largest change for the worse that a guardrail allows
    result: ChangeResult
    is_primary: bool


@dataclass(frozen=True)
class ArmResult:
    """An arm with its sums. `changes` is empty for the control."""

    arm: ExperimentArm
    requests: int
    units: int
    cost_femto: int
    changes: tuple[MetricChange, ...]
    saving: Saving | None  # if all requests of the model name moved to this arm


@dataclass(frozen=True)
class Saving:
    """Costs per month in femto-USD at the rate of requests during the experiment."""

    requests: int
    control_femto: int
    treatment_femto: int
    low_femto: int | None
    high_femto: int | None

    @property
    def femto(self) -> int:
        return self.control_femto - self.treatment_femto


@dataclass(frozen=True)
class ExperimentResults:
    experiment: Experiment
    arms: tuple[ArmResult, ...]
    requests: int
    sample_ratio_p: float  # the smallest one so far
    decision: Decision
    winner: str  # name of the arm that the decision `better` is about
    points: tuple[ExperimentPoint, ...]  # hourly, oldest first


def read_results(experiment: Experiment, now: datetime) -> ExperimentResults:
    """Return the results of the counted requests. The tenant's scope must be open."""
    arms = experiment.arm_list
    rows = ArmTotal.objects.for_tenant(experiment.tenant_id).filter(experiment_id=experiment.pk)
    sums = {row.arm: _moments(row.moments) for row in rows}
    points = ExperimentPoint.objects.for_tenant(experiment.tenant_id).filter(experiment_id=experiment.pk)
    stored = tuple(points.order_by("hour"))
    units = [sums.get(number, {}).get(REQUESTS, Moments()).units for number in range(len(arms))]
    ratio = 1.0
    if experiment.unit != Experiment.Unit.METADATA:  # the client chooses the arm
        ratio = min([sample_ratio_p(units, [arm.share for arm in arms]), *(point.sample_ratio_p for point in stored)])
    found = tuple(_arm(experiment, number, sums, now) for number in range(len(arms)))
    decision, winner = _decide(experiment, found, ratio)
    total = sum(arm.requests for arm in found)
    return ExperimentResults(experiment, found, total, ratio, decision, winner, stored)


def find_harm(experiment: Experiment, results: ExperimentResults, sums: Mapping[int, Mapping[str, Moments]]) -> str:
    """Return the guardrail that a treatment certainly crosses; empty if there is none."""
    alpha = stop_alpha(len(experiment.guardrails), len(results.arms) - 1)
    control = sums.get(0, {})
    for number in range(1, len(results.arms)):
        for name, allowed in experiment.guardrails.items():
            metric = METRICS[name]
            interval = _interval(metric, control, sums.get(number, {}), alpha)
            if interval is not None and metric.does_harm(interval, allowed):
                return str(name)
    return ""


def read_sums(experiment: Experiment) -> dict[int, dict[str, Moments]]:
    """Return the sums of each arm and metric. The tenant's scope must be open."""
    rows = ArmTotal.objects.for_tenant(experiment.tenant_id).filter(experiment_id=experiment.pk)
    return {row.arm: _moments(row.moments) for row in rows}


def _moments(stored: Mapping[str, list[int]]) -> dict[str, Moments]:
    return {name: Moments(*values) for name, values in stored.items()}


def _interval(
    metric: Metric, control: Mapping[str, Moments], treatment: Mapping[str, Moments], alpha: float
) -> Interval | None:
    a, b = control.get(metric.name, Moments()), treatment.get(metric.name, Moments())
    return metric.change(a, b, alpha) if min(a.units, b.units) >= MIN_UNITS else None


def _arm(experiment: Experiment, number: int, sums: Mapping[int, Mapping[str, Moments]], now: datetime) -> ArmResult:
    control, own = sums.get(0, {}), sums.get(number, {})
    requests, cost = own.get(REQUESTS, Moments()), own.get("cost", Moments())
    changes = tuple(_change(experiment, metric, control, own) for metric in METRICS.values()) if number else ()
    arm = experiment.arm_list[number]
    saving = _saving(experiment, sums, changes, number, now) if number else None
    return ArmResult(arm, requests.x, requests.units, cost.x, changes, saving)


def _change(
    experiment: Experiment, metric: Metric, control: Mapping[str, Moments], own: Mapping[str, Moments]
) -> MetricChange:
    interval = _interval(metric, control, own, ALPHA)
    allowed = experiment.guardrails.get(metric.name)
    return MetricChange(
        metric,
        metric.value(control.get(metric.name, Moments())),
        metric.value(own.get(metric.name, Moments())),
        interval,
        allowed,
        metric.result(interval, allowed),
        metric.name == experiment.primary_metric,
    )


def _saving(
    experiment: Experiment,
    sums: Mapping[int, Mapping[str, Moments]],
    changes: tuple[MetricChange, ...],
    number: int,
    now: datetime,
) -> Saving | None:
    """Return the costs per month of all requests for the model name, in one arm or the other."""
    control, own = (sums.get(arm, {}).get("cost", Moments()) for arm in (0, number))
    if experiment.started_at is None or not control.w or not own.w:
        return None
    elapsed = (experiment.stopped_at or now) - experiment.started_at
    if elapsed < timedelta(hours=1):
        return None
    counted = sum(totals.get(REQUESTS, Moments()).x for totals in sums.values())
    share = sum(arm.share for arm in experiment.arm_list)
    requests = int(
        Fraction(counted * 100, share) * Fraction(MONTH // timedelta(seconds=1), int(elapsed.total_seconds()))
    )
    before, after = (int(Fraction(arm.x, arm.w) * requests) for arm in (control, own))
    interval = next(change.interval for change in changes if change.metric.name == "cost")
    if interval is None:
        return Saving(requests, before, after, None, None)
    return Saving(requests, before, after, -int(before * interval.high), -int(before * interval.low))


def _decide(experiment: Experiment, arms: tuple[ArmResult, ...], ratio: float) -> tuple[Decision, str]:
    """Return the decision and the arm that it is about."""
    if experiment.state == Experiment.State.DRAFT:
        return "draft", ""
    if ratio < SAMPLE_RATIO_ALPHA:
        return "sample_ratio", ""
    if experiment.stop_reason == Experiment.StopReason.HARM:
        return "harm", ""
    treatments = arms[1:]
    primary = {arm.arm.name: change for arm in treatments for change in arm.changes if change.is_primary}
    for arm in treatments:
        guarded = [change for change in arm.changes if change.allowed is not None and not change.is_primary]
        if primary[arm.arm.name].result == "better" and all(map(_holds, guarded)):
            return "better", arm.arm.name
    found = {change.result for change in primary.values()}
    if found == {"waiting"}:
        return "waiting", ""
    if found <= {"worse", "harm"}:
        return "worse", ""
    return ("no_difference" if found == {"within"} else "unclear"), ""


def _holds(change: MetricChange) -> bool:
    """Return whether the guardrail is certainly not crossed."""
    if change.interval is None or change.allowed is None:
        return False
    return change.metric.is_within(change.interval, change.allowed)
