"""Tenants that are billed in other currencies."""

from __future__ import annotations

from datetime import datetime

import facturx
from django.db.models import Sum

from billing.invoicing import checks, ubl
from billing.models import (
    Invoice,
    LedgerEntry,
)
from billing.pricing.prices import do_assign_book, do_propose_prices, do_publish_prices
from billing.rates.price_files import read_csv
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tests.support.billing.books import OCTOBER, invoiced, price, use
from tests.support.billing.invoice_forms import attached, document_of, failed_rules, failed_ubl_rules

MILLION = 10**6
CSV = ["model,tier,component,usd_per_million", "alpha,,uncached,10"]


def in_currency(tenant: Tenant, currency: str) -> None:
    book = currency.lower()
    do_publish_prices(do_propose_prices(read_csv(CSV), book=book, currency=currency), by=None)
    do_assign_book(tenant, book)


def bill(tenant: Tenant, amount: str, at: datetime = OCTOBER, currency: str = "EUR") -> Invoice:
    book = {"book": currency.lower(), "currency": currency, "number": at.month, "model": f"m{currency}{at.month}"}
    use(tenant, at, (price(amount, **book), MILLION))
    return invoiced(tenant, at)


def assert_valid(*invoices: Invoice) -> None:
    for invoice in invoices:
        _, xml = attached(invoice)
        assert facturx.xml_check_xsd(xml, flavor="factur-x", level="en16931")
        assert (failed_rules(xml), failed_ubl_rules(ubl.xml(document_of(invoice)))) == ([], [])
        with all_tenants_scope(BypassReason.BILLING):
            rows = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to__period")
            result = checks.check(rows.get(pk=invoice.pk))
        assert (result.ledger_difference, result.same_data, result.same_pdf) == (0, True, True)


def sums_by_currency() -> dict[str, int]:
    with all_tenants_scope(BypassReason.BILLING):
        sums = LedgerEntry.objects.all_tenants().order_by().values_list("transaction__currency")
        return {currency: int(nano) for currency, nano in sums.annotate(Sum("nano"))}
