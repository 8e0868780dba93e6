"""What requests may still use: windows of budgets, slices of windows leased to gateways, and corrections of usage."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import F, Q

from tenants.isolation.scopes import TenantManager


class Window(models.Model):
    """One period of one budget. A new period is a new row; rows are opened when a request first needs them.

    Invariants, at every commit: `used / 10**6 + held` is within the limit (unless somebody lowered that); `held` is the
    sum over its slices of what is outstanding; `used` is the sum of what was settled through its slices.
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
    carried = models.BigIntegerField(
        default=0, help_text="taken over from the period before, less what the next took over; added to the limit"
    )
    used = models.DecimalField(
        max_digits=38, decimal_places=0, default=0, help_text="in millionths of the unit; of money that is femto-USD"
    )
    held = models.BigIntegerField(default=0)
    refused = models.BigIntegerField(default=0, help_text="requests that a dry-run budget would have refused")

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["budget_id", "period_start"], name="window_once"),
            models.CheckConstraint(name="window_counts", condition=Q(used__gte=0, held__gte=0, refused__gte=0)),
        ]
        indexes: ClassVar = [
            models.Index(fields=["tenant_id", "-period_start"], name="window_tenant"),
            models.Index(fields=["period_end"], name="window_end"),  # NOTE: never changes, so that moves stay HOT
        ]

    def __str__(self) -> str:
        return f"budget {self.budget_id} from {self.period_start:%F}"


class Slice(models.Model):
    """A part of several windows at once, leased to a gateway, which admits requests from it without asking.

    `money`, `tokens` and `requests` are outstanding: granted, and neither returned nor settled. Once it is sealed all
    of that is held by requests. A slice of a lost gateway is reaped: its fence moves on, and what is outstanding goes
    back to the windows.
    """

    tenant_id = models.BigIntegerField()
    gateway_id = models.CharField(max_length=64)
    fence = models.IntegerField(default=1)
    windows = ArrayField(models.BigIntegerField())
    money = models.BigIntegerField()
    tokens = models.BigIntegerField()
    requests = models.BigIntegerField()
    settled_money = models.DecimalField(max_digits=38, decimal_places=0, default=0, help_text="femto-USD")
    settled_tokens = models.BigIntegerField(default=0)
    settled_requests = models.BigIntegerField(default=0)
    sealed = models.BooleanField()
    open = models.BooleanField(default=True)
    made_at = models.DateTimeField()
    leased_until = models.DateTimeField()
    reap_at = models.DateTimeField(help_text="no request admitted from it can still run")

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(
                name="slice_counts",
                condition=Q(money__gte=0, tokens__gte=0, requests__gte=0, settled_money__gte=0)
                & Q(settled_tokens__gte=0, settled_requests__gte=0),
            ),
        ]
        indexes: ClassVar = [
            models.Index(fields=["tenant_id"], condition=Q(open=True), name="slice_open_tenant"),
            models.Index(fields=["reap_at"], condition=Q(open=True), name="slice_open_reap"),
            models.Index(fields=["made_at"], name="slice_made"),
        ]

    def __str__(self) -> str:
        return f"slice {self.pk} of {self.gateway_id}"


class EarlyRelease(models.Model):
    """The unused part of a reservation that a gateway released when the execution ended, before its settlement.

    The settlement deletes the row and releases only the rest of the reservation. Reclaiming the lease deletes it too.
    """

    pk = models.CompositePrimaryKey("admitted_at", "request_id", "execution")
    admitted_at = models.DateTimeField()
    request_id = models.CharField(max_length=64)
    execution = models.SmallIntegerField()
    slice_id = models.BigIntegerField()
    money = models.BigIntegerField(help_text="released, in nano-USD")
    tokens = models.BigIntegerField(help_text="released")
    kept_money = models.BigIntegerField(help_text="what settlement will use at most, in nano-USD")
    kept_tokens = models.BigIntegerField(help_text="what settlement will use at most")

    class Meta:
        indexes: ClassVar = [models.Index(fields=["slice_id"], name="early_release_slice")]
        constraints: ClassVar = [
            models.CheckConstraint(
                name="early_release_counts",
                condition=Q(money__gte=0, tokens__gte=0, kept_money__gte=0, kept_tokens__gte=0),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.request_id}/{self.execution}"


class Adjustment(models.Model):
    """A correction of a usage event: what it says is added to what the event says. Never changed.

    Columns are named as the event's. `outcome` is why: what the execution turned out to be, or that it came too late.
    """

    class Why(models.TextChoices):
        FAILED = "failed"  # the caller was told that it failed
        CANCELLED = "cancelled"  # it had been cancelled, with other counts
        LATE = "late"  # its hold had been given back, and its budgets had no room any more: nobody pays

    pk = models.CompositePrimaryKey("admitted_at", "request_id", "execution", "outcome")
    admitted_at = models.DateTimeField()
    request_id = models.CharField(max_length=64)
    execution = models.SmallIntegerField()
    outcome = models.CharField(max_length=16, choices=Why)
    tenant_id = models.BigIntegerField()
    project_id = models.BigIntegerField()
    key_id = models.BigIntegerField()
    model = models.CharField(max_length=128)
    uncached = models.IntegerField()
    cache_read = models.IntegerField()
    cache_write_5m = models.IntegerField()
    cache_write_1h = models.IntegerField()
    output = models.IntegerField()
    answer_hit_input = models.IntegerField()
    answer_hit_output = models.IntegerField()
    price_version = models.BigIntegerField(null=True)
    price_ids = ArrayField(models.BigIntegerField(null=True), null=True)
    cost_femto = models.DecimalField(max_digits=38, decimal_places=0)
    saved_femto = models.DecimalField(max_digits=38, decimal_places=0)
    slice_id = models.BigIntegerField(null=True)
    invoice_period = models.BigIntegerField()
    made_at = models.DateTimeField()

    objects = TenantManager()

    class Meta:
        indexes: ClassVar = [
            models.Index(F("tenant_id"), F("admitted_at").desc(), name="adjustment_tenant_time"),
            models.Index(fields=["invoice_period", "tenant_id"], name="adjustment_period"),
            models.Index(fields=["slice_id"], name="adjustment_slice"),
        ]

    def __str__(self) -> str:
        return f"{self.request_id}/{self.execution} {self.outcome}"


class Correction(models.Model):
    """What the reconciler added to a window or slice so that it agrees with the events again. Never changed."""

    made_at = models.DateTimeField()
    tenant_id = models.BigIntegerField()
    window_id = models.BigIntegerField()
    used = models.DecimalField(max_digits=38, decimal_places=0)
    held = models.BigIntegerField()

    objects = TenantManager()

    class Meta:
        indexes: ClassVar = [models.Index(fields=["window_id"], name="correction_window")]

    def __str__(self) -> str:
        return f"window {self.window_id}: used {self.used:+}, held {self.held:+}"


class Reconciliation(models.Model):
    """What one run of the reconciler found. Operators see the newest on their first screen."""

    at = models.DateTimeField()
    windows = models.IntegerField(help_text="compared")
    differences = models.JSONField(default=list)
    corrected = models.IntegerField(default=0)
    overdue_slices = models.IntegerField(default=0)
    quarantined = models.IntegerField(default=0, help_text="messages nobody has looked at")

    class Meta:
        ordering: ClassVar = ["-id"]

    def __str__(self) -> str:
        return f"{self.at:%F %T}: {len(self.differences)} differences"

    @property
    def is_clean(self) -> bool:
        return not (self.differences or self.overdue_slices or self.quarantined)
