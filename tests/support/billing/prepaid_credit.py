"""Prepaid credit, its payments and invoices."""

from __future__ import annotations

from datetime import UTC, datetime

from billing.models import BillingEntity, Invoice
from billing.payments.recording import Received, do_record_payment
from billing.periods import default_entity
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tests.support.billing.books import (
    NOVEMBER,
    invoiced,
    price,
    use,
)

MILLION, CENT = 10**6, 10**7


SINGLE, MULTI = BillingEntity.VoucherType


def change_entity(**fields: object) -> None:
    with all_tenants_scope(BypassReason.BILLING):
        BillingEntity.objects.filter(pk=default_entity().pk).update(**fields)


def pay(cents: int, reference: str = "p1", **fields: object) -> None:
    do_record_payment(Received("stripe", reference, cents, datetime.now(UTC), **({"tenant": "acme"} | fields)))


def bill(tenant: Tenant, dollars: str, at: datetime = NOVEMBER, number: int = 1) -> Invoice:
    """Use and invoice an amount before tax. The credit of the tenant is older."""
    use(tenant, at, (price(dollars, model=f"m{at.month}{number}"), MILLION))
    return invoiced(tenant, at)
