"""Budgets in money, quotas in tokens or requests: what a tenant, project, key or member may use in a period."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q

from billing.currencies.amounts import MAX_BALANCE, MAX_BUDGET
from billing.models.budget_leases import BudgetPeriod
from tenants.isolation.scopes import TenantManager
from tenants.models import ApiKey, OutboxEmail, Project, Tenant, User, WebhookEvent

# `Budget.limit_in` for a row `b` of budgets and a row `w` of budget periods, which may be null. Parameter: now.
LIMIT_SQL = (
    "b.amount + coalesce(w.rolled_over, 0)"
    " + CASE WHEN b.increase_expires_at > %(now)s THEN b.temporary_increase ELSE 0 END"
)


def default_thresholds() -> list[int]:
    """Return the percentages of its limit at which a budget alerts by default."""
    return [50, 80, 100]


class Budget(models.Model):
    """A limit for each day or month, or for a lifetime. Its budget periods count what is used and reserved.

    A budget names at most one of project, key and member; without one it applies to the whole tenant. A member's budget
    applies to the keys that the member created. Amounts are whole nano-USD, tokens or requests.
    """

    class Period(models.TextChoices):
        DAY = "day"
        MONTH = "month"
        LIFETIME = "lifetime"

    class Mode(models.TextChoices):
        HARD = "hard"  # rejects
        SOFT = "soft"  # only counts
        DRY_RUN = "dry_run"  # counts, and counts what it would have rejected

    AUDITED: ClassVar = (
        "name",
        "project_id",
        "key_id",
        "member_id",
        "unit",
        "period",
        "amount",
        "mode",
        "reduce_max_tokens",
        "temporary_increase",
        "increase_expires_at",
        "rollover_limit",
        "thresholds",
        "alert_forecast",
        "alerts_muted_until",
        "active",
    )

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    name = models.CharField(max_length=100)
    project = models.ForeignKey(Project, on_delete=models.CASCADE, null=True)
    key = models.ForeignKey(ApiKey, on_delete=models.CASCADE, null=True)
    member = models.ForeignKey(User, on_delete=models.CASCADE, null=True)
    unit = models.CharField(max_length=8, choices=BudgetPeriod.Unit)
    period = models.CharField(max_length=8, choices=Period)
    amount = models.BigIntegerField()
    mode = models.CharField(max_length=8, choices=Mode, default=Mode.HARD)
    reduce_max_tokens = models.BooleanField(
        default=False, help_text="reduce max_tokens of a request that does not fit, instead of rejecting it"
    )
    temporary_increase = models.BigIntegerField(default=0)
    increase_expires_at = models.DateTimeField(null=True)
    rollover_limit = models.BigIntegerField(
        default=0, help_text="most of the unused amount that rolls over to the next period"
    )
    thresholds = ArrayField(models.SmallIntegerField(), default=default_thresholds, blank=True, help_text="in percent")
    alert_forecast = models.BooleanField(default=True, help_text="alert when the forecast passes the limit")
    alerts_muted_until = models.DateTimeField(null=True, help_text="until then, alerts are recorded and not sent")
    active = models.BooleanField(default=True)
    is_balance = models.BooleanField(
        default=False, db_default=False, help_text="the gate of a prepaid tenant, which follows its balance"
    )
    created_at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()
    pending_gateways: tuple[str, ...] | None = None  # gateways that have not applied the last change; None: unknown

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(
                name="budget_amounts",
                condition=(Q(amount__range=(0, MAX_BUDGET)) | Q(is_balance=True, amount__range=(0, MAX_BALANCE)))
                & Q(temporary_increase__range=(0, MAX_BUDGET), rollover_limit__range=(0, MAX_BUDGET)),
            ),
            models.UniqueConstraint(
                fields=["tenant"], condition=Q(is_balance=True, active=True), name="budget_balance_once"
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

    def active_increase(self, now: datetime) -> int:
        """Return the temporary increase, or 0 if there is none or it has expired."""
        return self.temporary_increase if self.increase_expires_at and self.increase_expires_at > now else 0

    def limit_in(self, budget_period: BudgetPeriod | None, now: datetime) -> int:
        """Return the limit of a budget period: the amount, what rolled over, and an active temporary increase."""
        rolled_over = budget_period.rolled_over if budget_period else 0
        return self.amount + rolled_over + self.active_increase(now)


def current_periods(tenant_id: int, budgets: Iterable[Budget], now: datetime) -> dict[int, BudgetPeriod]:
    """Return the budgets' current periods by the budgets' IDs. A budget that was not used has none."""
    rows = BudgetPeriod.objects.for_tenant(tenant_id).filter(
        Q(period_end__gt=now) | Q(period_end=None), period_start__lte=now, budget_id__in=[row.pk for row in budgets]
    )
    return {row.budget_id: row for row in rows}


class BudgetAlert(models.Model):
    """A threshold that a budget period passed. Amounts are of that time, in the budget's unit."""

    FORECAST: ClassVar = "forecast"
    AUDITED: ClassVar = ("threshold", "acknowledged_at")

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    budget = models.ForeignKey(Budget, on_delete=models.CASCADE)
    budget_period = models.ForeignKey(BudgetPeriod, on_delete=models.CASCADE)
    threshold = models.CharField(max_length=8, help_text="percent, or `forecast`")
    used = models.BigIntegerField()
    limit = models.BigIntegerField()
    forecast = models.BigIntegerField(null=True, help_text="expected by the period's end; only of forecast alerts")
    event = models.ForeignKey(WebhookEvent, on_delete=models.SET_NULL, null=True)
    email = models.ForeignKey(OutboxEmail, on_delete=models.SET_NULL, null=True)
    is_muted = models.BooleanField(default=False, db_default=False, help_text="not sent, because alerts were muted")
    acknowledged_at = models.DateTimeField(null=True)
    acknowledged_by = models.CharField(max_length=254, blank=True, default="", db_default="")
    created_at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["budget_period", "threshold"], name="budget_alert_once")
        ]
        indexes: ClassVar = [models.Index(fields=["budget", "-id"], name="budget_alert_budget")]

    def __str__(self) -> str:
        return f"{self.budget}: {self.threshold}"
