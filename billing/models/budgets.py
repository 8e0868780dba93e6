"""Budgets in money, quotas in tokens or requests: what a tenant, project, key or member may use in a period."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q

from billing.models.holds import Window
from tenants.isolation.scopes import TenantManager
from tenants.models import ApiKey, OutboxEmail, Project, Tenant, User, WebhookEvent

MAX_BUDGET_NANO = 10**17  # nano-USD, so a hundred million dollars; sums of several stay within a bigint


def usual_thresholds() -> list[int]:
    """At how many percent of its limit a budget alerts, if nothing else is said."""
    return [50, 80, 100]


class Budget(models.Model):
    """A limit for each day or month, or without a period. Its windows (billing.models.holds) count what it lets pass.

    Of project, key and member at most one is named; none: the whole tenant. A member's budget counts the keys they
    made. Amounts are whole nano-USD, tokens or requests.
    """

    class Period(models.TextChoices):
        DAY = "day"
        MONTH = "month"
        LIFETIME = "lifetime"

    class Mode(models.TextChoices):
        HARD = "hard"  # refuses
        SOFT = "soft"  # only counts
        DRY_RUN = "dry_run"  # counts, and counts what it would have refused

    AUDITED: ClassVar = (
        "name",
        "project_id",
        "key_id",
        "member_id",
        "unit",
        "period",
        "amount",
        "mode",
        "clamp",
        "raise_amount",
        "raise_until",
        "rollover_cap",
        "thresholds",
        "alert_forecast",
        "active",
    )

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    name = models.CharField(max_length=100)
    project = models.ForeignKey(Project, on_delete=models.CASCADE, null=True)
    key = models.ForeignKey(ApiKey, on_delete=models.CASCADE, null=True)
    member = models.ForeignKey(User, on_delete=models.CASCADE, null=True)
    unit = models.CharField(max_length=8, choices=Window.Unit)
    period = models.CharField(max_length=8, choices=Period)
    amount = models.BigIntegerField()
    mode = models.CharField(max_length=8, choices=Mode, default=Mode.HARD)
    clamp = models.BooleanField(default=False, help_text="shorten answers that are too dear, rather than refuse them")
    raise_amount = models.BigIntegerField(default=0)
    raise_until = models.DateTimeField(null=True)
    rollover_cap = models.BigIntegerField(default=0, help_text="how much unused amount a period takes over at most")
    thresholds = ArrayField(models.SmallIntegerField(), default=usual_thresholds, blank=True, help_text="in percent")
    alert_forecast = models.BooleanField(default=True, help_text="alert when the forecast passes the limit")
    active = models.BooleanField(default=True)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()
    pending_gateways: tuple[str, ...] | None = None  # those that have not applied the last change; None: not known

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(
                name="budget_amounts",
                condition=Q(
                    amount__range=(0, 10**17), raise_amount__range=(0, 10**17), rollover_cap__range=(0, 10**17)
                ),
            ),
            models.CheckConstraint(
                name="budget_scope",
                condition=Q(project__isnull=True, key__isnull=True)
                | Q(project__isnull=True, member__isnull=True)
                | Q(key__isnull=True, member__isnull=True),
            ),
        ]

    def __str__(self) -> str:
        return self.name


class BudgetAlert(models.Model):
    """That a period of a budget passed one of its thresholds, once. Amounts as they were then, in the budget's unit."""

    FORECAST: ClassVar = "forecast"

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    budget = models.ForeignKey(Budget, on_delete=models.CASCADE)
    window = models.ForeignKey(Window, on_delete=models.CASCADE)
    threshold = models.CharField(max_length=8, help_text="percent, or `forecast`")
    used = models.BigIntegerField()
    limit = models.BigIntegerField()
    forecast = models.BigIntegerField(null=True, help_text="expected by the period's end; of alerts by forecast alone")
    event = models.ForeignKey(WebhookEvent, on_delete=models.SET_NULL, null=True)
    mail = models.ForeignKey(OutboxEmail, on_delete=models.SET_NULL, null=True)
    at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [models.UniqueConstraint(fields=["window", "threshold"], name="budget_alert_once")]
        indexes: ClassVar = [models.Index(fields=["budget", "-id"], name="budget_alert_budget")]

    def __str__(self) -> str:
        return f"{self.budget}: {self.threshold}"
