"""Usage that is not part of a request: stored tokens and machines over time."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import F, Q

from billing.rates.metered import METERED
from tenants.isolation.scopes import TenantManager
from tenants.models import Tenant


class MeteredUsage(models.Model):
    """An amount of a metered component over a time, with its price and cost. Written once for each reference.

    A reversal is a row with the negative amount and cost of the row that it reverses.
    """

    AUDITED: ClassVar = ("component", "model", "amount", "started_at", "ended_at", "reference", "reverses_id")

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    reference = models.CharField(max_length=200, help_text="the sender's identifier")
    component = models.CharField(max_length=20, choices=[(each.value, each.value) for each in METERED])
    model = models.CharField(max_length=128, help_text="the model or deployment")
    amount = models.BigIntegerField(help_text="tokens or machines")
    started_at = models.DateTimeField()
    ended_at = models.DateTimeField()
    price_id = models.BigIntegerField()
    nano_per_million = models.BigIntegerField()
    cost_femto = models.DecimalField(max_digits=38, decimal_places=0)
    invoice_period = models.BigIntegerField(help_text="the billing period whose invoice includes it")
    recorded_at = models.DateTimeField(auto_now_add=True)
    reverses = models.OneToOneField("self", on_delete=models.PROTECT, null=True, related_name="reversal")

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["tenant", "reference"], name="metered_usage_once"),
            models.UniqueConstraint(fields=["id", "tenant"], name="metered_usage_of_tenant"),
            models.CheckConstraint(
                name="metered_usage_amounts",
                condition=Q(reverses=None, amount__gt=0, cost_femto__gte=0, ended_at__gte=F("started_at"))
                | Q(reverses__isnull=False, amount__lt=0, cost_femto__lte=0),
            ),
        ]
        indexes: ClassVar = [models.Index(fields=["invoice_period", "tenant"], name="metered_usage_period")]

    def __str__(self) -> str:
        return self.reference
