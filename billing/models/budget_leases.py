"""Budget periods, the leases of gateways on them, early releases, and corrections of usage."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.indexes import BrinIndex, GinIndex
from django.db import models
from django.db.models import F, Q

from billing.models.token_columns import PricedTokens
from tenants.isolation.scopes import TenantManager


class BudgetPeriod(models.Model):
    """One day, month or lifetime of a budget. The first request of a new period creates its row.

    Invariants at every commit:

    - `used / 10**6 + reserved` is within the limit, unless the limit was lowered.
    - `reserved` is the sum of what is outstanding in its leases.
    - `used` is the sum of what was settled through its leases, in their rows and in `BudgetLeaseSum`.
    """

    class Unit(models.TextChoices):
        MONEY = "money"  # whole nano-USD
        TOKENS = "tokens"
        REQUESTS = "requests"

    tenant_id = models.BigIntegerField()
    budget_id = models.BigIntegerField()
    unit = models.CharField(max_length=8, choices=Unit)
    period_start = models.DateTimeField()
    period_end = models.DateTimeField(null=True, help_text="None: it never ends")
    rolled_over = models.BigIntegerField(
        default=0, help_text="taken over from the period before, less what the next took over; added to the limit"
    )
    used = models.DecimalField(
        max_digits=38, decimal_places=0, default=0, help_text="in millionths of the unit; of money that is femto-USD"
    )
    reserved = models.BigIntegerField(default=0)
    rejected = models.BigIntegerField(default=0, help_text="requests that a dry-run budget would have rejected")

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["budget_id", "period_start"], name="budget_period_once"),
            models.CheckConstraint(
                name="budget_period_counts", condition=Q(used__gte=0, reserved__gte=0, rejected__gte=0)
            ),
        ]
        indexes: ClassVar = [
            models.Index(fields=["tenant_id", "-period_start"], name="budget_period_tenant"),
            # Of columns that never change, so that updates of the amounts stay HOT.
            models.Index(fields=["period_end"], name="budget_period_end"),
        ]

    def __str__(self) -> str:
        return f"budget {self.budget_id} from {self.period_start:%F}"


class BudgetLease(models.Model):
    """A part of several budget periods, leased to a gateway, which admits requests from it without a database access.

    `money`, `tokens` and `requests` are outstanding: granted, and neither returned nor settled. All that is outstanding
    in a fully reserved lease belongs to requests. The lease of a lost gateway is reclaimed: its fencing token
    increases, and its outstanding amounts go back to the budget periods.
    """

    tenant_id = models.BigIntegerField()
    gateway_id = models.CharField(max_length=64)
    fencing_token = models.IntegerField(default=1)
    budget_period_ids = ArrayField(models.BigIntegerField())
    money = models.BigIntegerField()
    tokens = models.BigIntegerField()
    requests = models.BigIntegerField()
    settled_money = models.DecimalField(max_digits=38, decimal_places=0, default=0, help_text="femto-USD")
    settled_tokens = models.BigIntegerField(default=0)
    settled_requests = models.BigIntegerField(default=0)
    fully_reserved = models.BooleanField()
    open = models.BooleanField(default=True)
    created_at = models.DateTimeField()
    leased_until = models.DateTimeField()
    reclaim_at = models.DateTimeField(help_text="no request admitted from it can still run")

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(
                name="budget_lease_counts",
                condition=Q(money__gte=0, tokens__gte=0, requests__gte=0, settled_money__gte=0)
                & Q(settled_tokens__gte=0, settled_requests__gte=0),
            ),
        ]
        indexes: ClassVar = [
            models.Index(fields=["tenant_id"], condition=Q(open=True), name="budget_lease_open_tenant"),
            models.Index(fields=["reclaim_at"], condition=Q(open=True), name="budget_lease_open_reclaim"),
            models.Index(fields=["created_at"], name="budget_lease_created"),
            GinIndex(fields=["budget_period_ids"], name="budget_lease_periods"),
        ]

    def __str__(self) -> str:
        return f"lease {self.pk} of {self.gateway_id}"


class BudgetLeaseSum(models.Model):
    """What was settled through the closed leases of the same budget periods that were created on one UTC day.

    `billing.reservations.lease_sums` removes the rows of these leases. Their IDs and fencing tokens stay, so that
    later usage and corrections are added to the budget periods.
    """

    tenant_id = models.BigIntegerField()
    budget_period_ids = ArrayField(models.BigIntegerField())
    day = models.DateField()
    lease_ids = ArrayField(models.BigIntegerField())
    fencing_tokens = ArrayField(
        models.IntegerField(), help_text="the last one of each lease, in the order of lease_ids"
    )
    settled_money = models.DecimalField(max_digits=38, decimal_places=0, help_text="femto-USD")
    settled_tokens = models.BigIntegerField()
    settled_requests = models.BigIntegerField()

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["tenant_id", "budget_period_ids", "day"], name="budget_lease_sum_once"),
            models.CheckConstraint(
                name="budget_lease_sum_counts",
                condition=Q(settled_money__gte=0, settled_tokens__gte=0, settled_requests__gte=0),
            ),
        ]
        indexes: ClassVar = [
            GinIndex(fields=["lease_ids"], name="budget_lease_sum_leases"),
            GinIndex(fields=["budget_period_ids"], name="budget_lease_sum_periods"),
        ]

    def __str__(self) -> str:
        return f"{len(self.lease_ids)} leases of {self.day}"


class EarlyRelease(models.Model):
    """The unused part of a reservation that a gateway released when the execution ended, before its settlement.

    The settlement deletes the row and releases only the rest of the reservation. Reclaiming the lease deletes it too.
    """

    pk = models.CompositePrimaryKey("admitted_at", "request_id", "execution")
    admitted_at = models.DateTimeField()
    request_id = models.CharField(max_length=64)
    execution = models.SmallIntegerField()
    lease_id = models.BigIntegerField()
    money = models.BigIntegerField(help_text="released, in nano-USD")
    tokens = models.BigIntegerField(help_text="released")
    retained_money = models.BigIntegerField(help_text="what settlement will use at most, in nano-USD")
    retained_tokens = models.BigIntegerField(help_text="what settlement will use at most")

    class Meta:
        indexes: ClassVar = [models.Index(fields=["lease_id"], name="early_release_lease")]
        constraints: ClassVar = [
            models.CheckConstraint(
                name="early_release_counts",
                condition=Q(money__gte=0, tokens__gte=0, retained_money__gte=0, retained_tokens__gte=0),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.request_id}/{self.execution}"


class Adjustment(PricedTokens):
    """A signed correction of a usage event, added to the event's counts. Written once.

    Columns are named as the event's. `outcome` is the reason of the correction.
    """

    class Reason(models.TextChoices):
        FAILED = "failed"  # the caller got an error
        CANCELLED = "cancelled"  # it had been cancelled, with other counts
        LATE = "late"  # its reservation had been reclaimed, and its budgets have no room: written off
        RECONCILED = "reconciled"  # the provider's export counts fewer tokens

    pk = models.CompositePrimaryKey("admitted_at", "request_id", "execution", "outcome")
    admitted_at = models.DateTimeField()
    request_id = models.CharField(max_length=64)
    execution = models.SmallIntegerField()
    outcome = models.CharField(max_length=16, choices=Reason)
    tenant_id = models.BigIntegerField()
    project_id = models.BigIntegerField()
    key_id = models.BigIntegerField()
    model = models.CharField(max_length=128)
    price_version = models.BigIntegerField(null=True)
    price_ids = ArrayField(models.BigIntegerField(null=True), null=True)
    cost_femto = models.DecimalField(max_digits=38, decimal_places=0)
    saved_femto = models.DecimalField(max_digits=38, decimal_places=0)
    lease_id = models.BigIntegerField(null=True)
    invoice_period = models.BigIntegerField()
    created_at = models.DateTimeField()

    objects = TenantManager()

    class Meta:
        indexes: ClassVar = [
            models.Index(F("tenant_id"), F("admitted_at").desc(), name="adjustment_tenant_time"),
            models.Index(fields=["invoice_period", "tenant_id"], name="adjustment_period"),
            models.Index(fields=["lease_id"], name="adjustment_lease"),
            BrinIndex(fields=["created_at"], name="adjustment_created", autosummarize=True),
        ]

    def __str__(self) -> str:
        return f"{self.request_id}/{self.execution} {self.outcome}"


class BudgetCorrection(models.Model):
    """Amounts that the reconciler added to a budget period so that it agrees with its leases. Written once."""

    created_at = models.DateTimeField()
    tenant_id = models.BigIntegerField()
    budget_period_id = models.BigIntegerField()
    used = models.DecimalField(max_digits=38, decimal_places=0)
    reserved = models.BigIntegerField()

    objects = TenantManager()

    class Meta:
        indexes: ClassVar = [models.Index(fields=["budget_period_id"], name="budget_correction_period")]

    def __str__(self) -> str:
        return f"budget period {self.budget_period_id}: used {self.used:+}, reserved {self.reserved:+}"


class Reconciliation(models.Model):
    """The result of one run of the reconciler. The operators' first page shows the newest."""

    created_at = models.DateTimeField()
    budget_periods = models.IntegerField(help_text="compared")
    differences = models.JSONField(default=list)
    corrected = models.IntegerField(default=0)
    overdue_leases = models.IntegerField(default=0)
    quarantined = models.IntegerField(default=0, help_text="messages in quarantine that no operator has handled")
    is_full = models.BooleanField(
        default=False, db_default=False, help_text="whether all of the last days was compared, not only changes"
    )
    horizon = models.BigIntegerField(null=True, help_text="number of the first transaction that it may not have seen")

    class Meta:
        ordering: ClassVar = ["-id"]

    def __str__(self) -> str:
        return f"{self.created_at:%F %T}: {len(self.differences)} differences"

    @property
    def is_clean(self) -> bool:
        return not (self.differences or self.overdue_leases or self.quarantined)
