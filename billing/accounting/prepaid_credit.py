"""The roll-forward of credit of a billing entity: how the unused credit of its tenants changed in a month.

It is computed from the grants and their applications, each at the time at which the ledger books it. So the sum of the
closing balances is the ledger's account `credits`, and what is left of the grants.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple

from django.db.models import CharField, Exists, F, OuterRef, QuerySet, Subquery, Sum, Value
from django.db.models.functions import Cast, Coalesce, Concat

from billing.accounting.journal import bounds_of_month, is_billed_by, is_in_time, require_begun
from billing.accounting.trial_balance import format_nano
from billing.currencies.amounts import DEFAULT_CURRENCY
from billing.models import CHARGES, BillingEntity, CreditApplication, CreditGrant, Invoice, LedgerTransaction
from billing.pricing.currencies import other_currencies
from tenants.models import Tenant

_GRANT = "grant:"  # start of the keys of the transactions of credit that was not bought
_CHANGES = {"bought": 1, "granted": 1, "used": -1, "expired": -1, "refunded": -1}


class CreditRollForwardRow(NamedTuple):
    """The unused credit of one type in one currency, and its changes in a month. `tenant` is empty for all tenants."""

    tenant: str
    grant_type: str
    currency: str
    opening: str
    bought: str
    granted: str
    used: str
    expired: str
    refunded: str
    closing: str


_Key = tuple[str, str, str]


def roll_forward_credit(entity: BillingEntity, month: str, *, by_tenant: bool = False) -> list[CreditRollForwardRow]:
    """Return the changes of credit in a month by type and currency; inside `all_tenants_scope(…)`.

    Args:
        by_tenant: return rows for each tenant.

    Raises:
        FieldRefused: the month is in the future.
    """
    require_begun(entity, month)
    start, end = bounds_of_month(entity, month)
    slugs = dict(Tenant.objects.all_tenants().values_list("pk", "slug")) if by_tenant else {}
    currencies = other_currencies()

    def sum_changes(start: datetime | None, end: datetime) -> dict[_Key, dict[str, int]]:
        found: dict[_Key, dict[str, int]] = defaultdict(lambda: dict.fromkeys(_CHANGES, 0))
        for name, rows, owner in _changes(entity, start, end):
            sums = rows.order_by().values_list("tenant_id", f"{owner}grant_type").annotate(Sum("nano"))
            for tenant_id, grant_type, nano in sums:
                key = (slugs.get(tenant_id, ""), grant_type, currencies.get(tenant_id, DEFAULT_CURRENCY))
                found[key][name] += int(nano)
        return found

    earlier, changed = sum_changes(None, start), sum_changes(start, end)
    return [_row(key, _total(earlier.get(key, {})), changed[key]) for key in sorted({*earlier, *changed})]


def _total(changes: dict[str, int]) -> int:
    return sum(_CHANGES[name] * nano for name, nano in changes.items())


def _row(key: _Key, opening: int, changes: dict[str, int]) -> CreditRollForwardRow:
    amounts = (opening, *changes.values(), opening + _total(changes))
    return CreditRollForwardRow(*key, *(format_nano(nano, key[2]) for nano in amounts))


def _changes(entity: BillingEntity, start: datetime | None, end: datetime) -> Iterator[tuple[str, QuerySet[Any], str]]:
    """Yield each kind of change with its rows, and the relation from a row to its grant.

    Documents count at the time of issue, and everything else when it was booked, as in the journal.
    """
    granted = LedgerTransaction.objects.all_tenants().filter(key=Concat(Value(_GRANT), _text(OuterRef("pk"))))
    grants = CreditGrant.objects.all_tenants()
    bought = grants.exclude(purchase=None).exclude(Exists(granted)).filter(purchase__entity=entity)
    yield "bought", _during(bought, F("purchase__issued_at"), start, end), ""
    given = grants.filter(is_billed_by(entity))
    yield "granted", _during(given, Subquery(granted.values("created_at")[:1]), start, end), ""
    uses = CreditApplication.objects.all_tenants().exclude(invoice=None).filter(invoice__entity=entity)
    charged = uses.filter(invoice__invoice_type__in=CHARGES)
    yield "used", _during(charged.filter(nano__gt=0), F("invoice__issued_at"), start, end), "grant__"
    cancellations = Invoice.objects.all_tenants().filter(
        refers_to=OuterRef("invoice"), invoice_type=Invoice.InvoiceType.CANCELLATION
    )
    # Voids of earlier releases have no cancellation.
    voided = Coalesce(Subquery(cancellations.values("issued_at")[:1]), F("applied_at"))
    yield "used", _during(charged.filter(nano__lt=0), voided, start, end), "grant__"
    refunds = uses.exclude(invoice__invoice_type__in=CHARGES)
    yield "refunded", _during(refunds, F("invoice__issued_at"), start, end), "grant__"
    expired = CreditApplication.objects.all_tenants().filter(is_billed_by(entity), invoice=None)
    yield "expired", _during(expired, F("applied_at"), start, end), "grant__"


def _during(rows: QuerySet[Any], moment: Any, start: datetime | None, end: datetime) -> QuerySet[Any]:
    found: QuerySet[Any] = rows.alias(booked_at=moment).filter(is_in_time("booked_at", start, end))
    return found


def _text(number: Any) -> Cast:
    return Cast(number, CharField())
