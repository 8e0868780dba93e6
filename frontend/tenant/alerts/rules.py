"""Alert rules in words, and their lists: the rules with their states, and the history of their alerts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from django.db.models import QuerySet
from django.utils.translation import gettext as _

from billing.currencies.amounts import NANO_DIGITS, decimal
from frontend.core.filter_chips import FilterBar, choice_chip, filter_bar
from frontend.core.languages import lazy_text as _lazy
from frontend.core.languages import localize
from frontend.core.lists import ListPage, keyset_page
from frontend.core.numbers import Money, exact
from frontend.core.page_context import PageContext
from frontend.tenant.budgets.alerts import deliveries_of
from millrace.apps.alerts.models import AlertRule, RuleAlert

PAGE_SIZE = 30
MAX_LISTED = 200
Metric = AlertRule.Metric
METRICS: Mapping[Metric, str] = {
    Metric.ERROR_RATE: _lazy("Error rate"),
    Metric.TTFT_P95: _lazy("Latency"),
    Metric.KEY_EXPIRY: _lazy("Key expiry"),
    Metric.CREDIT: _lazy("Credit"),
    Metric.REPLICA_DOWN: _lazy("Replica down"),
    Metric.DEPLOYMENT_DOWN: _lazy("Deployment down"),
    Metric.UPSTREAM_DOWN: _lazy("Upstream down"),
}
OF_TENANT = tuple(metric for metric in METRICS if metric not in AlertRule.OF_PLATFORM)
OF_PLATFORM = tuple(metric for metric in METRICS if metric in AlertRule.OF_PLATFORM)
# The sentence that a rule is. In its form, each name in braces is a field.
SENTENCES: Mapping[Metric, str] = {
    Metric.ERROR_RATE: _lazy(
        "Alert when more than {threshold} % of the requests of {project} to {model} fail within {window}, if there are"
        " at least {min_requests} requests."
    ),
    Metric.TTFT_P95: _lazy(
        "Alert when the TTFT p95 of {project} on {model} is above {threshold} ms within {window}, if there are at least"
        " {min_requests} requests."
    ),
    Metric.KEY_EXPIRY: _lazy("Alert {threshold} days before an API key of {project} expires."),
    Metric.CREDIT: _lazy("Alert when the credit balance is below {threshold}."),
    Metric.REPLICA_DOWN: _lazy("Alert {tenant} when a replica sends no heartbeat for {threshold} minutes."),
    Metric.DEPLOYMENT_DOWN: _lazy("Alert {tenant} when {model} has no available replica for {threshold} minutes."),
    Metric.UPSTREAM_DOWN: _lazy(
        "Alert {tenant} when the upstream of {model} is down or fails for {threshold} minutes."
    ),
}
WINDOWS = (
    (5, _lazy("5 minutes")),
    (15, _lazy("15 minutes")),
    (60, _lazy("1 hour")),
    (360, _lazy("6 hours")),
    (1440, _lazy("24 hours")),
)
ALL_PROJECTS, ALL_MODELS = _lazy("all projects"), _lazy("all models")
STATES = {"open": _lazy("Open"), "resolved": _lazy("Resolved")}


def in_words(rule: AlertRule) -> str:
    """Return the rule as a sentence."""
    return SENTENCES[Metric(rule.metric)].format(**words_of(rule))


def words_of(rule: AlertRule) -> dict[str, str]:
    """Return the words of the rule's sentence."""
    return {
        "threshold": threshold_text(rule.metric, rule.threshold),
        "window": str(dict(WINDOWS).get(rule.window_minutes or 0, "")),
        "min_requests": exact(rule.min_requests or 0),
        "project": rule.project.name if rule.project is not None else str(ALL_PROJECTS),
        "model": rule.model or str(ALL_MODELS),
        "tenant": rule.tenant.name,
    }


def threshold_text(metric: str, threshold: int) -> str:
    if metric == Metric.CREDIT:
        return Money.nano(threshold).text
    return percent_text(threshold) if metric == Metric.ERROR_RATE else exact(threshold)


def percent_text(hundredths: int) -> str:
    """Return hundredths of a percent without trailing zeros: 5, or 0.25."""
    return localize(decimal(hundredths, 2, 0))


def money_text(nano: int) -> str:
    return localize(decimal(nano, NANO_DIGITS, 2))


def visible_rules(ctx: PageContext) -> QuerySet[AlertRule]:
    """Return the active rules of the tenant; on operator pages, those of the platform."""
    if ctx.access is None:
        rows = AlertRule.objects.all_tenants().filter(metric__in=AlertRule.OF_PLATFORM)
    else:
        rows = AlertRule.objects.for_tenant(ctx.tenant)
    return rows.filter(active=True).select_related("project", "tenant")


def visible_alerts(ctx: PageContext) -> QuerySet[RuleAlert]:
    """Return the alerts of the tenant's rules; on operator pages, of the rules of the platform."""
    if ctx.access is None:
        rows = RuleAlert.objects.all_tenants().filter(rule__metric__in=AlertRule.OF_PLATFORM)
    else:
        rows = RuleAlert.objects.for_tenant(ctx.tenant)
    return rows.select_related("rule__project", "rule__tenant", "event", "email")


def routes(ctx: PageContext) -> dict[str, str]:
    """Return the names of the pages that change a rule or an alert."""
    prefix = "operator-alerts-rules" if ctx.access is None else "alerts-rules"
    return {verb: f"{prefix}-{verb}" for verb in ("new", "edit", "mute", "remove", "acknowledge")}


def rules(ctx: PageContext) -> dict[str, Any]:
    """Return the rules with their states, newest first."""
    rows = list(visible_rules(ctx).order_by("-pk")[:MAX_LISTED])
    open_alerts = visible_alerts(ctx).filter(rule__in=rows, resolved_at=None)
    counts = Counter(open_alerts.values_list("rule_id", flat=True))
    return {
        "rows": [_rule(ctx, row, counts[row.pk]) for row in rows],
        "routes": routes(ctx),
    }


def _rule(ctx: PageContext, rule: AlertRule, alerts: int) -> dict[str, Any]:
    state, kind = (_("Alert"), "bad") if alerts else (_("OK"), "good")
    return {
        "rule": rule,
        "words": in_words(rule),
        "metric": METRICS[Metric(rule.metric)],
        "state": state,
        "kind": kind,
        "muted_until": rule.muted_until if rule.is_muted(ctx.now) else None,
        "is_editable": ctx.access is None or not rule.is_of_platform,
    }


def filters(ctx: PageContext) -> FilterBar:
    """Return the filter chips of the history."""
    url, state, metric = ctx.url("alerts-rules"), ctx.query.get("state", ""), ctx.query.get("metric", "")
    metrics = [(str(name), label) for name, label in METRICS.items()]
    return filter_bar(
        ctx,
        url,
        (
            choice_chip(ctx, url, "state", _("State"), STATES.items(), state if state in STATES else None),
            choice_chip(ctx, url, "metric", _("Rule"), metrics, metric if metric in METRICS else None),
        ),
    )


def history(ctx: PageContext) -> ListPage:
    """Return a page of alerts with their deliveries, newest first."""
    rows = visible_alerts(ctx)
    if (state := ctx.query.get("state")) in STATES:
        rows = rows.filter(resolved_at__isnull=state == "open")
    if (metric := ctx.query.get("metric")) in METRICS:
        rows = rows.filter(rule__metric=metric)
    url = ctx.url("operator-alerts") if ctx.access is None else ctx.url("alerts-rules")
    filtered = any(ctx.query.get(name) for name in ("state", "metric"))
    page = keyset_page(ctx, rows, url, PAGE_SIZE, filtered=filtered)
    alerts = list(page.rows)
    deliveries = deliveries_of(alerts, None if ctx.access is None else ctx.tenant.pk)
    acknowledge = routes(ctx)["acknowledge"]
    shown = [
        {
            "alert": alert,
            "words": in_words(alert.rule),
            "deliveries": deliveries[alert.pk],
            "acknowledge_url": ctx.url(acknowledge, alert.pk),
        }
        for alert in alerts
    ]
    return replace(page, rows=shown)
