"""The list of experiments, and the results of one in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

from frontend.core.labels import METRIC_LABELS
from frontend.core.languages import lazy_text as _lazy
from frontend.core.languages import localize
from frontend.core.numbers import Money, common_places, decimals, duration, percent, points, share
from frontend.core.page_context import PageContext
from millrace.apps.experiments.metrics import ALPHA, METRICS, MIN_UNITS, Metric
from millrace.apps.experiments.models import ArmTotal
from millrace.apps.experiments.results import (
    SAMPLE_RATIO_ALPHA,
    ArmResult,
    ExperimentResults,
    MetricChange,
    Saving,
    read_results,
)
from tenants.models import Experiment
from tenants.routing_policies.target_checks import TargetChecks

MAX_EXPERIMENTS = 100  # in the list
STATES = {"draft": (_lazy("Draft"), ""), "running": (_lazy("Running"), "info"), "stopped": (_lazy("Stopped"), "")}
_SCALES = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
_RESULTS = {
    "waiting": (_lazy("Waiting for data"), ""),
    "better": (_lazy("Better"), "good"),
    "worse": (_lazy("Worse"), "warn"),
    "harm": (_lazy("Guardrail crossed"), "bad"),
    "within": (_lazy("Within guardrail"), ""),
    "unclear": (_lazy("No clear difference"), ""),
}


@dataclass(frozen=True)
class Banner:
    """The decision in words."""

    kind: str
    icon: str
    title: str
    text: str


@dataclass(frozen=True)
class IntervalBar:
    """The interval as drawing, in percent of the width. The middle is no difference."""

    low: str
    width: str
    estimate: str
    limit: str | None  # where the guardrail begins
    limit_width: str


@dataclass(frozen=True)
class ChangeRow:
    """A metric of the table."""

    label: str
    role: str
    control: str
    treatment: str
    change: str
    interval: str
    kind: str
    result: str
    result_kind: str
    bar: IntervalBar | None


@dataclass(frozen=True)
class TreatmentTable:
    """The metrics of a treatment against the control."""

    name: str
    rows: tuple[ChangeRow, ...]
    scale: str
    saving: Saving | None


def experiments(ctx: PageContext) -> list[tuple[Experiment, int, tuple[str, str]]]:
    """Return the experiments with their counted requests and their states. Call inside `ctx.scope()`."""
    rows = list(Experiment.objects.for_tenant(ctx.tenant)[:MAX_EXPERIMENTS])
    counts: dict[int, int] = {}
    totals = ArmTotal.objects.for_tenant(ctx.tenant).filter(experiment_id__in=[row.pk for row in rows])
    for experiment_id, requests in totals.values_list("experiment_id", "requests"):
        counts[experiment_id] = counts.get(experiment_id, 0) + requests
    return [(row, counts.get(row.pk, 0), STATES[row.state]) for row in rows]


def detail(ctx: PageContext, row: Experiment) -> dict[str, Any]:
    """Return the results of an experiment. Call inside `ctx.scope()`."""
    results = read_results(row, ctx.now)
    units = sum(arm.units for arm in results.arms)
    return {
        "experiment": row,
        "results": results,
        "state": STATES[row.state],
        "banner": _banner(results),
        "problems": TargetChecks(ctx.tenant.pk, with_replicas=True).of_experiment(row),
        "tables": [_table(arm) for arm in results.arms[1:]],
        "arms": [(arm, Money(arm.cost_femto), share(arm.units, units)) for arm in results.arms],
        "cost_places": common_places(Money(arm.cost_femto) for arm in results.arms),
        "ratio_is_wrong": results.sample_ratio_p < SAMPLE_RATIO_ALPHA,
        "ratio_p": f"{results.sample_ratio_p:.2g}",
        "day": _day(ctx, row),
        "guardrails": [
            (METRIC_LABELS[name], _format_guardrail(METRICS[name], value)) for name, value in row.guardrails.items()
        ],
        "primary": METRIC_LABELS[row.primary_metric],
        "confidence": f"{1 - ALPHA:.0%}",
    }


def _day(ctx: PageContext, row: Experiment) -> int:
    if row.started_at is None:
        return 0
    return ((row.stopped_at or ctx.now) - row.started_at).days + 1


def _banner(results: ExperimentResults) -> Banner:
    row = results.experiment
    metric = METRIC_LABELS[row.primary_metric]
    if results.decision == "draft":
        return Banner("info", "info", _("Not started"), _("Start the experiment to assign requests to its arms."))
    if results.decision == "sample_ratio":
        text = _("More units are missing from one arm than chance explains. Do not use these results.")
        return Banner("bad", "danger", _("Sample ratio mismatch"), text)
    if results.decision == "harm":
        label = METRIC_LABELS.get(row.stop_metric) or _("A guardrail")
        text = _(
            "%(label)s became worse than its guardrail allows. All requests use the route without the experiment."
        ) % {"label": label}
        return Banner("bad", "stop", _("Stopped automatically"), text)
    if results.decision == "better":
        change = _primary(results, results.winner)
        text = _("%(metric)s: %(change)s, with 95%% confidence. No guardrail is crossed.") % {
            "metric": metric,
            "change": _change(change),
        }
        return Banner("good", "check", _("Ready to roll out: %(winner)s") % {"winner": results.winner}, text)
    if results.decision == "worse":
        return Banner(
            "warn",
            "warning",
            _("Keep the control"),
            _("%(metric)s is worse with 95%% confidence.") % {"metric": metric},
        )
    if results.decision == "no_difference":
        return Banner(
            "info",
            "info",
            _("No difference that matters"),
            _("%(metric)s differs by less than its guardrail.") % {"metric": metric},
        )
    if results.decision == "waiting":
        return Banner(
            "info",
            "clock",
            _("Collecting data"),
            _("Results appear from %(units)s units per arm on.") % {"units": MIN_UNITS},
        )
    if any(change.is_primary and change.result == "better" for arm in results.arms[1:] for change in arm.changes):
        text = _("%(metric)s is better, but a guardrail may still be crossed. More requests are needed.") % {
            "metric": metric
        }
    else:
        text = _("%(metric)s is not clearly different. More requests are needed.") % {"metric": metric}
    return Banner("info", "clock", _("No decision yet"), text)


def _primary(results: ExperimentResults, name: str) -> MetricChange:
    (arm,) = (arm for arm in results.arms if arm.arm.name == name)
    return next(change for change in arm.changes if change.is_primary)


def _table(arm: ArmResult) -> TreatmentTable:
    scale = _scale(arm.changes)
    rows = tuple(_row(change, scale) for change in arm.changes)
    return TreatmentTable(arm.arm.name, rows, f"{scale:.0%}", arm.saving)


def _scale(changes: Sequence[MetricChange]) -> float:
    """Return the largest change of the drawing."""
    found = [0.05]
    for change in changes:
        if change.interval is not None:
            found += [abs(float(change.interval.low)), abs(float(change.interval.high))]
    return next((scale for scale in _SCALES if scale >= max(found)), _SCALES[-1])


def _row(change: MetricChange, scale: float) -> ChangeRow:
    metric, interval = change.metric, change.interval
    label, kind = _RESULTS[change.result]
    direction = _("lower is better") if metric.is_lower_better else _("higher is better")
    roles = [_("Primary")] if change.is_primary else []
    if change.allowed is not None:
        roles.append(_("Guardrail, %(allowed)s") % {"allowed": _format_guardrail(metric, change.allowed)})
    bounds = (
        ""
        if interval is None
        else _("%(low)s to %(high)s")
        % {"low": _format_difference(metric, interval.low), "high": _format_difference(metric, interval.high)}
    )
    return ChangeRow(
        label=METRIC_LABELS[metric.name],
        role=", ".join([*roles, direction]).capitalize(),
        control=_value(metric, change.control),
        treatment=_value(metric, change.treatment),
        change=_change(change),
        interval=bounds,
        kind=kind,
        result=label,
        result_kind=kind,
        bar=_bar(change, scale),
    )


def _bar(change: MetricChange, scale: float) -> IntervalBar | None:
    if change.interval is None:
        return None
    low, high = _place(float(change.interval.low), scale), _place(float(change.interval.high), scale)
    limit: str | None = None
    limit_width = "0"
    if change.allowed is not None and change.allowed < scale:
        sign = 1 if change.metric.is_lower_better else -1
        place = _place(sign * change.allowed, scale)
        limit, limit_width = (f"{place:.2f}", f"{100 - place:.2f}") if sign > 0 else ("0", f"{place:.2f}")
    estimate = _place(float(change.interval.estimate), scale)
    return IntervalBar(f"{low:.2f}", f"{max(0.5, high - low):.2f}", f"{estimate:.2f}", limit, limit_width)


def _place(value: float, scale: float) -> float:
    """Return the horizontal place of a change, from 0 to 100."""
    return 50 + 50 * min(1.0, max(-1.0, value / scale))


def _change(change: MetricChange) -> str:
    return "–" if change.interval is None else _format_difference(change.metric, float(change.interval.estimate))


def _format_difference(metric: Metric, value: float) -> str:
    text = percent(value) if metric.is_relative else points(decimals(value * 100))
    return f"+{text}" if value > 0 else text


def _format_guardrail(metric: Metric, value: float) -> str:
    sign = "+" if metric.is_lower_better else "−"
    number = f"{sign}{localize(f'{value * 100:g}')}"
    amount = f"{number}%" if metric.is_relative else points(number)
    return (
        _("at most %(amount)s") % {"amount": amount}
        if metric.is_lower_better
        else _("at least %(amount)s") % {"amount": amount}
    )


def _value(metric: Metric, value: float | None) -> str:
    if value is None:
        return "–"
    if metric.name == "cost":
        return Money(round(value * 1000)).text
    if metric.name == "ttft":
        return duration(round(value * 1000))
    if metric.name == "itl":
        return f"{decimals(value / 1000)} ms"
    return percent(value)
