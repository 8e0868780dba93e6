"""The check of alert rules: triggers and resolves their alerts, with a webhook event and an email for new ones.

One transaction checks a rule and holds its row's lock, so a concurrent check of the rule waits and then finds the
alerts. A check that is killed leaves nothing behind, and the next one writes the alerts. An alert of requests is
resolved after its condition was false for a window, so that a value near the threshold does not trigger again and
again.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from django.conf import settings
from django.db.models import QuerySet

from millrace.apps.alerts.conditions import Breach, find_breaches
from millrace.apps.alerts.models import AlertRule, RuleAlert
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tenants.outbox.email_outbox import enqueue_email
from tenants.webhooks.event_types import ALERT_RESOLVED, ALERT_TRIGGERED, AlertData, EventType
from tenants.webhooks.outbox import enqueue

log = structlog.get_logger(__name__)

MAX_NEW = 100  # alerts of a rule in one check; the next check continues
RETENTION = timedelta(days=400)
DELETE_BATCH_SIZE = 5_000
_BILLING, _TECHNICAL = ("owner", "admin", "billing"), ("owner", "admin", "developer")
ROLES = tuple(sorted({*_BILLING, *_TECHNICAL}))  # roles whose members receive alerts by email


def check_rules(now: datetime | None = None) -> int:
    """Check all rules. Returns the number of new alerts. A rule whose check fails does not affect the others."""
    now = now or datetime.now(UTC)
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        rules = AlertRule.objects.all_tenants().filter(active=True).exclude(tenant__status=Tenant.Status.PURGED)
        rule_ids = list(rules.order_by("tenant_id", "pk").values_list("pk", flat=True))
    new = 0
    for rule_id in rule_ids:
        try:
            new += _check(rule_id, now)
        except Exception:  # the other rules must not be affected
            log.exception("alert_rule_check_failed", rule_id=rule_id)
    return new


def _check(rule_id: int, now: datetime) -> int:
    """Trigger and resolve the alerts of a rule. Returns the number of new alerts."""
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        rows = AlertRule.objects.all_tenants().select_related("tenant", "project").select_for_update(of=("self",))
        rule = rows.filter(pk=rule_id, active=True).first()
        if rule is None:
            return 0
        breaches = {breach.subject: breach for breach in find_breaches(rule, now)}
        alerts = RuleAlert.objects.for_tenant(rule.tenant_id).filter(rule=rule)
        open_alerts = list(alerts.filter(resolved_at=None))
        # The alert of a health event is never repeated; other conditions can trigger again after they were resolved.
        earlier = alerts.filter(subject__in=breaches) if rule.is_of_platform else alerts.filter(resolved_at=None)
        known = set(earlier.values_list("subject", flat=True))
        new = [breach for subject, breach in breaches.items() if subject not in known][:MAX_NEW]
        _trigger(rule, new, now)
        _follow(rule, open_alerts, breaches, now)
    return len(new)


def _trigger(rule: AlertRule, breaches: list[Breach], now: datetime) -> None:
    """Write the new alerts, with an event for each and one email for all of them."""
    if not breaches:
        return
    is_muted = rule.is_muted(now)
    email = None if is_muted else enqueue_email(rule.tenant_id, roles_of(rule), *_mail(rule, breaches))
    for breach in breaches:
        alert = RuleAlert.objects.create(
            tenant_id=rule.tenant_id,
            rule=rule,
            subject=breach.subject,
            summary=breach.summary,
            value=breach.value,
            threshold=rule.threshold,
            samples=breach.samples,
            email=email,
            is_muted=is_muted,
            created_at=now,
            last_seen_at=now,
            resolved_at=now if breach.is_over else None,
        )
        if not is_muted:
            alert.event = emit(alert, ALERT_TRIGGERED)
            alert.save(update_fields=["event"])
            if breach.is_over:
                emit(alert, ALERT_RESOLVED)


def _follow(rule: AlertRule, open_alerts: list[RuleAlert], breaches: dict[str, Breach], now: datetime) -> None:
    """Resolve the alerts whose condition is false, of requests since a window."""
    for alert in open_alerts:
        breach = breaches.get(alert.subject)
        if breach is not None and not breach.is_over:
            alert.last_seen_at = now
            alert.save(update_fields=["last_seen_at"])
        elif now - alert.last_seen_at >= rule.window:
            alert.resolved_at = now
            alert.save(update_fields=["resolved_at"])
            if not alert.is_muted:
                emit(alert, ALERT_RESOLVED)


def roles_of(rule: AlertRule) -> tuple[str, ...]:
    """Return the roles whose members receive the rule's alerts by email."""
    return _BILLING if rule.metric == AlertRule.Metric.CREDIT else _TECHNICAL


def emit(alert: RuleAlert, event_type: EventType[AlertData]) -> Any:
    """Write an event of the alert, in the transaction that changes it."""
    names = ("id", "metric", "threshold", "window_minutes", "min_requests", "project_id", "model")
    data = AlertData(
        alert_id=alert.pk,
        rule={name: getattr(alert.rule, name) for name in names},
        summary=alert.summary,
        value=alert.value,
        samples=alert.samples,
        triggered_at=alert.created_at.isoformat(),
        resolved_at=alert.resolved_at.isoformat() if alert.resolved_at else None,
    )
    return enqueue(alert.tenant_id, event_type, f"{event_type.name}:{alert.pk}", data)


def _mail(rule: AlertRule, breaches: list[Breach]) -> tuple[str, str]:
    """Return the subject and the text of the email for the new alerts of a rule."""
    more = f", and {len(breaches) - 1} more" if len(breaches) > 1 else ""
    text = "\n".join(breach.summary for breach in breaches)
    text += f"\n\nThis is an alert of {rule.tenant.name}. Acknowledge it or mute its rule here:"
    subject = f"{breaches[0].summary.partition(': ')[0][:180]}{more}"
    return subject, f"{text}\n{settings.MILLRACE.base_url}/t/{rule.tenant.slug}/alerts/rules/"


def alerts_of(tenant_id: int) -> QuerySet[RuleAlert]:
    """Return the alerts of a tenant's rules, newest first. The tenant scope must be open."""
    rows = RuleAlert.objects.for_tenant(tenant_id).select_related("rule__project", "event", "email")
    return rows.order_by("-pk")


def purge_expired(now: datetime | None = None) -> int:
    """Remove alerts that were resolved long ago. Returns their number."""
    before, removed = (now or datetime.now(UTC)) - RETENTION, 0
    while True:
        with all_tenants_scope(BypassReason.HOUSEKEEPING):
            rows = RuleAlert.objects.all_tenants().filter(resolved_at__lt=before)
            batch = list(rows.values_list("pk", flat=True)[:DELETE_BATCH_SIZE])
            RuleAlert.objects.all_tenants().filter(pk__in=batch).delete()
        removed += len(batch)
        if len(batch) < DELETE_BATCH_SIZE:
            return removed
