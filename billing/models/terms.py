"""Price terms of tenants: tiers, discounts and minimums by month."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from django.db import models
from django.db.models import F, Q

from billing.models.prorated import ProratedCharge
from billing.rates.terms import TermRule
from tenants.isolation.scopes import TenantManager
from tenants.models import Tenant
from tenants.one_line_text import check_line


class PriceTerm(ProratedCharge):
    """A term that changes the sum of a tenant's usage in each month. It never changes, except that it may end.

    `billing.rates.terms` reads `rule`.
    """

    AUDITED: ClassVar = ("description", "rule", "first_month", "last_month", "starts_on")

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

    def rule_in(self, month: str) -> TermRule:
        """Return the rule of a month. A minimum may be prorated."""
        rule = self.decode()
        return msgspec.structs.replace(rule, cents=self.share_in(month).prorate(rule.cents))
