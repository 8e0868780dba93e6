"""Aging of receivables: what the tenants of a billing entity owed on a day, by the days past due.

The amounts are those of the ledger as it was booked on that day: a payment, credit note, void or write-off counts from
its own day on. Their sum in each currency is the balance of the ledger's account `receivable` on that day.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime
from typing import NamedTuple

from django.db.models import Sum

from billing.accounting.booking_days import booked_before, end_of, require_document, require_past
from billing.currencies.amounts import decimal_cents, minor_digits, nano_a_cent
from billing.models import Account, BillingEntity, Invoice, LedgerEntry
from tenants import csv_tables

LIMITS = (0, 30, 60, 90)  # the last day past due of each class but the last one


class AgingRow(NamedTuple):
    """The open amounts of a tenant in a currency, or of all tenants. Amounts have the decimals of the currency."""

    currency: str
    tenant: str  # slug; empty: all tenants
    name: str
    not_due: str
    days_1_30: str
    days_31_60: str
    days_61_90: str
    over_90_days: str
    total: str


def report_aging(entity: BillingEntity, on: date, now: datetime | None = None) -> list[AgingRow]:
    """Return the open amounts at the end of a day by currency and tenant, with a row for all tenants at the end of each
    currency; inside `all_tenants_scope(…)`.

    Raises:
        FieldRefused: the day is in the future, or before the entity's first document.
    """
    require_past("date", on, entity, now or datetime.now(UTC))
    documents = Invoice.objects.all_tenants().filter(entity=entity, issued_at__isnull=False)
    require_document("date", on, documents, entity)
    found: dict[str, dict[tuple[str, str], list[int]]] = {}
    for currency, slug, name, due_on, cents in _open_amounts(entity, on):
        classes = found.setdefault(currency, {}).setdefault((slug, name), [0] * (len(LIMITS) + 1))
        classes[_class_of(due_on, on)] += cents
    rows: list[AgingRow] = []
    for currency, tenants in sorted(found.items()):
        rows += [_row(currency, slug, name, classes) for (slug, name), classes in sorted(tenants.items())]
        rows.append(_row(currency, "", "", [sum(column) for column in zip(*tenants.values(), strict=True)]))
    return rows


def aging_as_csv(rows: Iterable[AgingRow]) -> str:
    """Return the rows with their heading as CSV."""
    return csv_tables.as_csv(AgingRow._fields, rows)


def _open_amounts(entity: BillingEntity, on: date) -> Iterable[tuple[str, str, str, date | None, int]]:
    """Yield currency, tenant, due date and cents of the invoices that were open at the end of a day."""
    documents = Invoice.objects.all_tenants().filter(entity=entity)
    entries = LedgerEntry.objects.all_tenants().filter(account=Account.RECEIVABLE, invoice__entity=entity)
    entries = entries.filter(booked_before(documents, end_of(on, entity))).order_by()
    fields = ("invoice__currency", "tenant__slug", "tenant__name", "invoice__due_on")
    for currency, slug, name, due_on, nano in entries.values_list(*fields).annotate(sum=Sum("nano")):
        if nano:
            yield currency, slug, name, due_on, int(nano) // nano_a_cent(currency)


def _class_of(due_on: date | None, on: date) -> int:
    late = 0 if due_on is None else (on - due_on).days
    return sum(late > limit for limit in LIMITS)


def _row(currency: str, slug: str, name: str, classes: list[int]) -> AgingRow:
    amounts = [decimal_cents(cents, minor_digits(currency)) for cents in (*classes, sum(classes))]
    return AgingRow(currency, slug, name, *amounts)
