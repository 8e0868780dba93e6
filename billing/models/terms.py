"""Price terms of tenants: tiers, discounts and minimums by month."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from django.db import models
from django.db.models import F, Q

from billing.models.invoicing import check_line
from billing.rates.terms import TermRule
from tenants.isolation.scopes import TenantManager
from tenants.models import Tenant


class PriceTerm(models.Model):
    """A term that changes the sum of a tenant's usage in each month. It never changes, except that it may end.

    `billing.rates.terms` reads `rule`.
    """

    AUDITED: ClassVar = ("description", "rule", "first_month", "last_month")

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    description = models.CharField(max_length=200, validators=[check_line], help_text="printed on invoices")
    rule = models.JSONField()
    first_month = models.CharField(max_length=7)  # 2026-11
    last_month = models.CharField(max_length=7, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(
                name="price_term_months", condition=Q(last_month="") | Q(last_month__gte=F("first_month"))
            )
        ]

    def __str__(self) -> str:
        return self.description

    def decode(self) -> TermRule:
        return msgspec.convert(self.rule, TermRule)
