"""Actions on alert rules and their alerts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from billing.currencies.amounts import MAX_BUDGET
from inference_worker.contract.texts import Text
from millrace.apps.alerts.checks import emit
from millrace.apps.alerts.models import WINDOWS, AlertRule, RuleAlert
from tenants import audit
from tenants.actions.common import ActionRefused, Conflict, FieldRefused, acknowledge, check, locked_tenant
from tenants.models import Project, Tenant
from tenants.webhooks.event_types import ALERT_RESOLVED

MAX_RULES = 20  # active ones of a tenant
MAX_MIN_REQUESTS = 100_000
DEFAULT_MIN_REQUESTS = 20
DEFAULT_WINDOW = 15
CHANGEABLE = ("threshold", "window_minutes", "min_requests", "muted_until")
Metric = AlertRule.Metric
# The lowest and the highest threshold of each metric, and their unit.
THRESHOLDS = {
    Metric.ERROR_RATE: (0, 9_999, "hundredths of a percent"),
    Metric.TTFT_P95: (1, 3_600_000, "milliseconds"),
    Metric.KEY_EXPIRY: (1, 365, "days"),
    Metric.CREDIT: (1, MAX_BUDGET, "nano-USD"),
    Metric.REPLICA_DOWN: (0, 1440, "minutes"),
    Metric.DEPLOYMENT_DOWN: (0, 1440, "minutes"),
    Metric.UPSTREAM_DOWN: (0, 1440, "minutes"),
}


def do_create_alert_rule(
    tenant: Tenant,
    *,
    metric: str,
    threshold: int,
    window_minutes: int | None = None,
    min_requests: int | None = None,
    project: Project | None = None,
    model: str = "",
) -> AlertRule:
    """Create a rule. The caller ensures that only operators create rules of the platform.

    Raises:
        ActionRefused: a value is wrong. Conflict: the tenant has the maximum of rules.
    """
    with locked_tenant(tenant) as locked:
        if AlertRule.objects.for_tenant(locked).filter(active=True).count() >= MAX_RULES:
            raise Conflict(
                Text("The maximum of %(max_rules)s alert rules is reached. Remove one first.", max_rules=MAX_RULES)
            )
        if project is not None and project.tenant_id != locked.pk:
            raise FieldRefused("project_id", "unknown", Text("The project is not this tenant's."))
        row = AlertRule(tenant=locked, metric=metric, threshold=threshold, project=project, model=model)
        row.window_minutes, row.min_requests = window_minutes, min_requests
        if metric in AlertRule.OF_REQUESTS:
            row.window_minutes = DEFAULT_WINDOW if window_minutes is None else window_minutes
            row.min_requests = DEFAULT_MIN_REQUESTS if min_requests is None else min_requests
        _check(row)
        row.save(force_insert=True)
        audit.record("alert_rule.created", row, tenant_id=locked.pk, after=audit.serialize_for_audit(row))
    return row


def do_change_alert_rule(rule: AlertRule, **fields: Any) -> AlertRule:
    """Change a rule. Its metric and scope cannot change.

    Raises:
        Conflict: it was removed. ActionRefused: a value is wrong.
    """
    if fixed := sorted(set(fields) - set(CHANGEABLE)):
        raise ActionRefused(Text("%(fixed)s cannot be changed. Create a new rule instead.", fixed=", ".join(fixed)))
    with locked_tenant(rule.tenant_id) as tenant:
        rows = AlertRule.objects.for_tenant(tenant).filter(pk=rule.pk, active=True).select_related("project")
        row = rows.select_for_update(of=("self",)).first()
        if row is None:
            raise Conflict(Text("This alert rule was removed."))
        before = audit.serialize_for_audit(row)
        for name, value in fields.items():
            setattr(row, name, value)
        _check(row)
        row.save(update_fields=list(fields))
        audit.record(
            "alert_rule.updated", row, tenant_id=tenant.pk, before=before, after=audit.serialize_for_audit(row)
        )
    return row


def do_remove_alert_rule(rule: AlertRule) -> bool:
    """Deactivate a rule and resolve its alerts, which are retained. Returns False if it was inactive."""
    with locked_tenant(rule.tenant_id) as tenant:
        row = AlertRule.objects.for_tenant(tenant).select_for_update().filter(pk=rule.pk, active=True).first()
        if row is None:
            return False
        before = audit.serialize_for_audit(row)
        row.active = False
        row.save(update_fields=["active"])
        for alert in RuleAlert.objects.for_tenant(tenant).select_related("rule").filter(rule=row, resolved_at=None):
            alert.resolved_at = datetime.now(UTC)
            alert.save(update_fields=["resolved_at"])
            if not alert.is_muted:
                emit(alert, ALERT_RESOLVED)
        audit.record(
            "alert_rule.deleted", row, tenant_id=tenant.pk, before=before, after=audit.serialize_for_audit(row)
        )
    return True


def do_acknowledge_rule_alert(alert: RuleAlert) -> bool:
    """Record that a user has seen the alert. Returns False if it was acknowledged before.

    Raises:
        Conflict: the alert no longer exists.
    """
    with locked_tenant(alert.tenant_id) as tenant:
        found = RuleAlert.objects.for_tenant(tenant).select_for_update().filter(pk=alert.pk)
        return acknowledge(found, tenant, "rule_alert.acknowledged")


def _check(rule: AlertRule) -> None:
    check(rule)
    metric = Metric(rule.metric)
    least, most, unit = THRESHOLDS[metric]
    if not least <= rule.threshold <= most:
        raise FieldRefused(
            "threshold",
            "invalid",
            Text("The threshold must be from %(least)s to %(most)s %(unit)s.", least=least, most=most, unit=unit),
        )
    if metric in AlertRule.OF_REQUESTS:
        if rule.window_minutes not in WINDOWS:
            windows = ", ".join(map(str, WINDOWS))
            raise FieldRefused(
                "window_minutes", "invalid", Text("The window must be one of %(windows)s minutes.", windows=windows)
            )
        if rule.min_requests is None or not 1 <= rule.min_requests <= MAX_MIN_REQUESTS:
            raise FieldRefused(
                "min_requests",
                "invalid",
                Text("Enter from 1 to %(max_min_requests)s requests.", max_min_requests=MAX_MIN_REQUESTS),
            )
    elif rule.window_minutes is not None or rule.min_requests is not None:
        raise ActionRefused(Text("window_minutes and min_requests do not apply to %(metric)s.", metric=metric))
    if rule.project is not None and metric not in {*AlertRule.OF_REQUESTS, Metric.KEY_EXPIRY}:
        raise FieldRefused("project_id", "invalid", Text("A project does not apply to %(metric)s.", metric=metric))
    if rule.model and (metric in (Metric.KEY_EXPIRY, Metric.CREDIT, Metric.REPLICA_DOWN)):
        raise FieldRefused("model", "invalid", Text("A model does not apply to %(metric)s.", metric=metric))
    if rule.muted_until is not None and rule.muted_until.tzinfo is None:
        rule.muted_until = rule.muted_until.replace(tzinfo=UTC)
