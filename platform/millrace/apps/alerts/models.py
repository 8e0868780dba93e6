"""Alert rules and the alerts that they triggered. Budgets have their own alerts (billing.budgets.alerts)."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import ClassVar

from django.db import models
from django.db.models import Q

from tenants.isolation.scopes import TenantManager
from tenants.models import OutboxEmail, Project, Tenant, WebhookEvent
from tenants.text_field import UserTextField

WINDOWS = (5, 15, 60, 360, 1440)  # minutes


class AlertRule(models.Model):
    """A condition that is checked every minute. Its alerts go to the members and channels of its tenant.

    Operators give a rule about the platform to the tenant that receives its alerts.
    """

    class Metric(models.TextChoices):
        ERROR_RATE = "error_rate"
        TTFT_P95 = "ttft_p95"
        KEY_EXPIRY = "key_expiry"
        CREDIT = "credit"
        REPLICA_DOWN = "replica_down"
        DEPLOYMENT_DOWN = "deployment_down"
        UPSTREAM_DOWN = "upstream_down"

    OF_REQUESTS: ClassVar = frozenset({Metric.ERROR_RATE, Metric.TTFT_P95})
    OF_PLATFORM: ClassVar = frozenset({Metric.REPLICA_DOWN, Metric.DEPLOYMENT_DOWN, Metric.UPSTREAM_DOWN})
    AUDITED: ClassVar = (
        *("metric", "threshold", "window_minutes", "min_requests", "project_id", "model", "muted_until", "active"),
    )

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    metric = models.CharField(max_length=16, choices=Metric)
    threshold = models.BigIntegerField(
        help_text="hundredths of a percent, milliseconds, days, nano-units of the currency, or minutes"
    )
    window_minutes = models.SmallIntegerField(null=True, help_text="of requests; null for other metrics")
    min_requests = models.IntegerField(null=True, help_text="fewer requests in the window trigger no alert")
    project = models.ForeignKey(Project, on_delete=models.CASCADE, null=True, help_text="null: all projects")
    model = models.CharField(max_length=128, blank=True, default="", help_text="requested or served; empty: all")
    muted_until = models.DateTimeField(null=True, help_text="until then, alerts are recorded and not sent")
    active = models.BooleanField(default=True)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(name="alert_rule_threshold", condition=Q(threshold__gte=0)),
            models.CheckConstraint(
                name="alert_rule_window",
                condition=Q(window_minutes__isnull=True, min_requests__isnull=True)
                | Q(window_minutes__gt=0, min_requests__gt=0),
            ),
        ]
        indexes: ClassVar = [models.Index(fields=["tenant", "-id"], name="alert_rule_tenant")]

    def __str__(self) -> str:
        return f"{self.metric} {self.threshold}"

    @property
    def is_of_platform(self) -> bool:
        """Whether only operators may create and change the rule."""
        return self.metric in self.OF_PLATFORM

    @property
    def window(self) -> timedelta:
        """The window of requests; zero for other metrics."""
        return timedelta(minutes=self.window_minutes or 0)

    def is_muted(self, now: datetime) -> bool:
        return self.muted_until is not None and self.muted_until > now


class RuleAlert(models.Model):
    """A time in which the condition of a rule was true. A rule has at most one open alert for each subject.

    `value`, `threshold` and `samples` are of the time at which it was triggered.
    """

    AUDITED: ClassVar = ("summary", "acknowledged_at")

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    rule = models.ForeignKey(AlertRule, on_delete=models.CASCADE)
    subject = models.CharField(max_length=128, blank=True, default="", help_text="ID of the key or health event")
    summary = UserTextField()
    value = models.BigIntegerField(null=True, help_text="in the unit of the threshold")
    threshold = models.BigIntegerField()
    samples = models.IntegerField(null=True, help_text="requests in the window")
    event = models.ForeignKey(WebhookEvent, on_delete=models.SET_NULL, null=True)
    email = models.ForeignKey(OutboxEmail, on_delete=models.SET_NULL, null=True)
    is_muted = models.BooleanField(default=False, help_text="not sent, because the rule was muted")
    acknowledged_at = models.DateTimeField(null=True)
    acknowledged_by = models.CharField(max_length=254, blank=True, default="")
    created_at = models.DateTimeField(help_text="when it was triggered")
    last_seen_at = models.DateTimeField(help_text="when the condition was last true")
    resolved_at = models.DateTimeField(null=True)

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["rule", "subject"], condition=Q(resolved_at__isnull=True), name="rule_alert_open_once"
            )
        ]
        indexes: ClassVar = [
            models.Index(fields=["tenant", "-id"], name="rule_alert_tenant"),
            models.Index(fields=["rule", "subject"], name="rule_alert_subject"),
            models.Index(fields=["resolved_at"], name="rule_alert_resolved"),
        ]

    def __str__(self) -> str:
        return self.summary
