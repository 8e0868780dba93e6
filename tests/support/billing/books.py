"""Prices and rated usage for tests of invoices, written directly to the tables."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Any, Self

import pytest
from django.db import connection

from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.files import stored_pdf
from billing.invoicing.finalizing import do_finalize
from billing.models import Adjustment, CompiledRateCard, Invoice, Period, Price, PriceBook, PriceVersion, UsageEvent
from billing.periods import close_after, default_entity, ensure_periods, stamps
from billing.rates.pricing import COMPONENTS, Component, Rate, encode_rates
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant

OCTOBER = datetime(2026, 10, 10, 12, tzinfo=UTC)
NOVEMBER = datetime(2026, 11, 10, 12, tzinfo=UTC)
DECEMBER = datetime(2026, 12, 5, 12, tzinfo=UTC)


EMPTY_PARTY = dict.fromkeys(("street", "postcode", "city", "region", "country", "vat_id"), "") | {"name": "Unknown"}


def dollars(amount: str) -> int:
    """Return a price in nano-USD per million tokens from USD per million."""
    whole, _, fraction = amount.partition(".")
    return int(whole) * 10**9 + int(fraction.ljust(9, "0"))


def price(amount: str, component: str = "uncached", *, model: str = "alpha", number: int = 1, **fields: Any) -> int:
    """Create a price of `usd` per million tokens and return its ID. `book` and `currency` are those of its book."""
    with all_tenants_scope(BypassReason.COMMAND):
        currency = fields.pop("currency", "USD")
        book, _ = PriceBook.objects.get_or_create(name=fields.pop("book", "list"), defaults={"currency": currency})
        tier = fields.pop("tier", "standard")
        proposed = {"model": model, "tier": tier, "component": component, "nano_per_million": dollars(amount)}
        version = PriceVersion.objects.filter(book=book, number=number).first() or PriceVersion.objects.create(
            book=book,
            number=number,
            state="published",
            body={"prices": [proposed]},
            effective_from=datetime(2026, number, 1, tzinfo=UTC),
        )
        return Price.objects.create(
            version=version,
            book=book,
            model=model,
            tier=tier,
            component=component,
            nano_per_million=dollars(amount),
            effective_from=datetime(2026, number, 1, tzinfo=UTC),
            effective_until=datetime(2026 + number // 12, number % 12 + 1, 1, tzinfo=UTC),
            **fields,
        ).pk


def use(
    tenant: Tenant,
    at: datetime,
    *used: tuple[int, int],
    times: int = 1,
    stamped: Callable[[], object] = int,
    request_id: str = "",
    settled_at: datetime | None = None,
    project_id: int = 1,
    key_id: int = 1,
) -> None:
    """Settle `times` events of (price id, tokens) each, as the settler does; calls `stamped` once they are stamped."""
    with all_tenants_scope(BypassReason.SETTLER), connection.cursor() as cursor:
        prices = Price.objects.in_bulk([pk for pk, _ in used])
        tokens = {prices[pk].component: count for pk, count in used}
        ids = {prices[pk].component: pk for pk, _ in used}
        (period,) = stamps(cursor, [(tenant.pk, at)])
        stamped()
        UsageEvent.objects.all_tenants().bulk_create(
            UsageEvent(
                admitted_at=at,
                request_id=request_id or f"req_{secrets.token_hex(12)}",
                execution=0,
                tenant_id=tenant.pk,
                project_id=project_id,
                key_id=key_id,
                model=next(iter(prices.values())).model,
                attempt=1,
                outcome="completed",
                finish_reason="stop",
                **{name: tokens.get(name, 0) for name in COMPONENTS},
                replica_id="r",
                block_size=32,
                queue_us=0,
                ttft_us=0,
                duration_us=0,
                price_ids=[ids.get(name) for name in COMPONENTS],
                cost_femto=sum(prices[pk].nano_per_million * count for pk, count in used),
                invoice_period=period,
                settled_at=settled_at or datetime.now(UTC),
            )
            for _ in range(times)
        )


def take_back(event: UsageEvent, at: datetime) -> None:
    """Reverse an event by an adjustment at this time, as the settler does when an execution has failed."""
    counts = {name: -getattr(event, name) for name in COMPONENTS}
    kept = ("admitted_at", "request_id", "execution", "tenant_id", "project_id", "key_id", "model", "price_ids")
    with all_tenants_scope(BypassReason.SETTLER), connection.cursor() as cursor:
        (period,) = stamps(cursor, [(event.tenant_id, event.admitted_at)])
        Adjustment.objects.create(
            **{name: getattr(event, name) for name in kept},
            **counts,
            outcome="failed",
            cost_femto=-event.cost_femto,
            saved_femto=-event.saved_femto,
            invoice_period=period,
            created_at=at,
        )


def make_months(first: int = 9, last: int = 12) -> None:
    """Create the partitions of the months of 2026 that tests of invoices use."""
    make_partitions([date(2026, month, 1) for month in range(first, last + 1)])


def make_partitions(months: list[date]) -> None:
    """Create the missing partitions of these months. A new database has those of the previous month and later."""
    with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
        cursor.execute("SELECT billing_create_partitions(%s)", [months])


def period(at: datetime) -> Period:
    with all_tenants_scope(BypassReason.BILLING):
        entity = default_entity()
        ensure_periods(entity, at, at)
        return Period.objects.select_related("entity").get(entity=entity, starts_at__lte=at, ends_at__gt=at)


def draft_for(tenant: Tenant) -> Invoice:
    """Return a draft without lines."""
    month = period(OCTOBER)
    with all_tenants_scope(BypassReason.BILLING):
        return Invoice.objects.create(
            tenant=tenant, entity=month.entity, period=month, seller=EMPTY_PARTY, buyer=EMPTY_PARTY
        )


def newest_closable_month(now: datetime | None = None) -> datetime:
    """Return the start of the newest month in UTC whose period can be closed. UTC is the default entity's time zone.

    It is the previous month, or until `close_after` has passed since its end, the one before.
    """
    at = (now or datetime.now(UTC)) - close_after()
    month = (at.replace(day=1) - timedelta(days=1)).replace(day=1)
    return month.replace(hour=0, minute=0, second=0, microsecond=0)


def over(month: Period) -> datetime:
    """Return the earliest time at which the period can be closed."""
    return month.ends_at + timedelta(hours=1)


def invoiced(tenant: Tenant, at: datetime) -> Invoice:
    """Close the month and finalize the tenant's invoice."""
    month = period(at)
    do_close_period(month, now=over(month))
    (draft,) = [row for row in do_draft(month, tenant) if row.invoice_type == Invoice.InvoiceType.INVOICE]
    return do_finalize(draft, now=month.ends_at)


def pdf_of(invoice: Invoice) -> bytes:
    """Return the stored PDF of a final invoice."""
    with all_tenants_scope(BypassReason.BILLING):
        rows = Invoice.objects.all_tenants().select_related("entity", "period", "refers_to")
        return stored_pdf(rows.get(pk=invoice.pk))


LIST_A = {"uncached": "3", "cache_write_5m": "3.75", "cache_write_1h": "6", "cache_read": "0.30", "output": "15"}


def rate_card(model: str = "smollm2-135m", *, tenant_id: int | None = None, tier: str = "standard", **usd: str) -> int:
    """Add a rate card of a model, for all tenants unless one is named; return its version. The default is list A."""
    rates = []
    for component, amount in (usd or LIST_A).items():
        rates.append(Rate(price(amount, component, model=model, tier=tier), Component(component), dollars(amount)))
    with all_tenants_scope(BypassReason.COMMAND):
        return CompiledRateCard.objects.create(
            tenant_id=tenant_id,
            model=model,
            tier=tier,
            effective_from=datetime(2020, 1, 1, tzinfo=UTC),
            rates=encode_rates(tuple(rates)),
        ).pk


class _InNovember(datetime):
    """A `datetime` whose present is in November 2026, the month of most tests of prepaid credit."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return cls(2026, 11, 9, 12, tzinfo=tz)


def start_credit_in_november(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let credit start in November, the month of the invoices, whenever the tests run."""
    for module in ("ledger.credits", "invoicing.prepayment", "invoicing.purchases"):
        monkeypatch.setattr(f"billing.{module}.datetime", _InNovember)
