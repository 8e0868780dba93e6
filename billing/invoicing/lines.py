"""Invoice lines from priced usage: one statement for all tenants of a period.

A line is the usage of one price in one month of admission. `invoice_period` of events selects the period. Adjustments
of usage that an earlier period billed are separate lines; those with a negative sum go to a credit note on its invoice.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.db import connection
from django.db.models import QuerySet

from billing.currencies.amounts import NANO_DIGITS, cents, decimal, symbol
from billing.invoicing.corrected_prices import RatedDifference, differences
from billing.invoicing.usage_shares import LineKey, Shares, UsageShare, describe_shares
from billing.invoicing.usage_sql import sum_usage
from billing.models import Invoice, InvoiceLine, Period, ReratedInvoice, Rerating, UsageEvent
from billing.rates.metered import metered_amount
from billing.rates.price_book import WEEKDAYS
from billing.rates.pricing import COMPONENTS, DAYS_A_WEEK, MINUTES_A_DAY, UTC_ZONE, Component

_CONDITION = """(%(tenant)s::bigint IS NULL OR {row}tenant_id = %(tenant)s)
        AND (%(since)s::timestamptz IS NULL OR {settled_at} >= %(since)s)
        AND (%(before)s::timestamptz IS NULL OR {settled_at} < %(before)s)"""
_KNOWN = """SELECT %(tenant)s::bigint, price_id, usage_month, billed_period, events, tokens, first_at, last_at
    FROM jsonb_to_recordset(%(known)s::jsonb) AS known (price_id bigint, usage_month text, billed_period bigint,
        events bigint, tokens bigint, first_at timestamptz, last_at timestamptz)"""
_USED = f"""
{sum_usage(_CONDITION, known=_KNOWN)}
SELECT used.tenant_id, used.price_id, usage_month, billed_period, events, tokens,
    tokens::numeric * p.nano_per_million AS femto, first_at, last_at,
    p.model, p.tier, p.component, p.from_tokens AS prompt_length_band, p.from_minute, p.until_minute,
    p.from_weekday, p.until_weekday, p.time_zone, p.nano_per_million, v.number AS version
FROM used JOIN billing_price p ON p.id = used.price_id JOIN billing_priceversion v ON v.id = p.version_id
"""  # noqa: S608  (column names, nothing from outside)
_COUNT = """
SELECT tenant_id, count(*), sum(saved_femto) FROM billing_usageevent
WHERE invoice_period = %s AND (%s::bigint IS NULL OR tenant_id = %s) GROUP BY tenant_id
"""


class UsageLine(NamedTuple):
    """The usage of one price by a tenant in one month. `billed_period`: the period whose invoice it corrects."""

    tenant_id: int
    price_id: int
    usage_month: str
    billed_period: int | None
    events: int
    tokens: int
    femto: int
    first_at: datetime
    last_at: datetime
    model: str
    tier: str
    component: str
    prompt_length_band: int
    from_minute: int
    until_minute: int
    from_weekday: int
    until_weekday: int
    time_zone: str
    nano_per_million: int
    version: int
    shares: tuple[UsageShare, ...] = ()

    @property
    def place(self) -> tuple[object, ...]:
        """Return the sort key of the line, which groups lines by model."""
        component = [item.value for item in COMPONENTS].index(self.component)
        return (
            self.model,
            self.tier,
            self.usage_month,
            component,
            self.prompt_length_band,
            self.from_minute,
            self.from_weekday,
            self.version,
            self.price_id,
            self.billed_period or 0,
        )

    def corrects(self, billed: Period) -> bool:
        """Return whether the invoice of a period billed the usage. Archived usage was billed in its month."""
        return billed.label == self.usage_month if self.billed_period is None else billed.pk == self.billed_period

    @property
    def window(self) -> str:
        """Return the weekdays and hours of the price; empty for all."""
        return window(self)


def window(price: UsageLine | RatedDifference) -> str:
    """Return the weekdays and hours of a price, with the time zone if it is not UTC; empty for all."""
    days, minutes = (price.from_weekday, price.until_weekday - 1), (price.from_minute, price.until_minute)
    is_daily = days == (0, DAYS_A_WEEK - 1)
    if is_daily and minutes == (0, MINUTES_A_DAY):
        return ""
    hours = " – ".join(f"{minute // 60:02}:{minute % 60:02}" for minute in minutes)
    names = [WEEKDAYS[day].title() for day in dict.fromkeys(days)]
    parts = ("" if is_daily else " – ".join(names), hours, "" if price.time_zone == UTC_ZONE else price.time_zone)
    return " ".join(part for part in parts if part)


def find_usage(
    period: Period,
    tenant_id: int | None = None,
    known: Sequence[Mapping[str, Any]] = (),
    *,
    since: datetime | None = None,
    before: datetime | None = None,
) -> dict[int, list[UsageLine]]:
    """Return the billed usage of each tenant, or of one, in the order of lines.

    Args:
        known: stored sums of the tenant (`PeriodUsage`), to which the usage is added.
        since, before: only read usage that was settled in this time.
    """
    parameters: dict[str, Any] = {
        "period": period.pk,
        "starts_at": period.starts_at,
        "zone": period.entity.time_zone,
        "tenant": tenant_id,
        "known": json.dumps(list(known)),
        "since": since,
        "before": before,
    }
    found = defaultdict(list)
    with connection.cursor() as cursor:
        cursor.execute(_USED, parameters)
        for row in cursor.fetchall():
            use = UsageLine(*row)
            found[use.tenant_id].append(use._replace(femto=int(use.femto)))
    return {tenant: sorted(uses, key=lambda use: use.place) for tenant, uses in found.items()}


def attach_shares(uses: Iterable[UsageLine], shares: Shares) -> list[UsageLine]:
    """Return the usage with the shares of projects and cost centers in it."""
    return [use._replace(shares=tuple(sorted(shares.get(_key(use), ())))) for use in uses]


def _key(use: UsageLine) -> LineKey:
    return use.tenant_id, use.price_id, use.usage_month, use.billed_period


class Count(NamedTuple):
    """The number of a tenant's usage events in a period, and their cache savings in femto-USD."""

    events: int = 0
    saved: int = 0


def count_usage(period: Period, tenant_id: int | None = None) -> dict[int, Count]:
    """Return the counts of each tenant, or of one."""
    with connection.cursor() as cursor:
        cursor.execute(_COUNT, [period.pk, tenant_id, tenant_id])
        return {tenant: Count(events, int(saved)) for tenant, events, saved in cursor.fetchall()}


def lines_of(invoice: Invoice) -> QuerySet[InvoiceLine]:
    """Return an invoice's lines, in their order."""
    return InvoiceLine.objects.for_tenant(invoice.tenant_id).filter(invoice=invoice).order_by("position")


def events_of(invoice: Invoice, line: InvoiceLine | None) -> QuerySet[UsageEvent]:
    """Return the events of a line, or of the whole invoice."""
    rows = UsageEvent.objects.for_tenant(invoice.tenant_id).filter(invoice_period=invoice.period_id)
    if invoice.invoice_type == Invoice.InvoiceType.PURCHASE:
        return rows.none()
    if line is None:
        return rows
    if line.price_id is None:
        return rows.none()
    time = {"admitted_at__gte": line.first_at, "admitted_at__lte": line.last_at}
    return rows.filter(price_ids__contains=[line.price_id], **time)


def select_usage(invoice_type: str, uses: Iterable[UsageLine], billed: Period | None = None) -> list[UsageLine]:
    """Return the usage that belongs on a document of this type.

    Args:
        billed: of a correction, the period of the invoice that it corrects.
    """
    if invoice_type == Invoice.InvoiceType.INVOICE:
        return [use for use in uses if use.femto >= 0 and use.tokens]
    if invoice_type == Invoice.InvoiceType.CORRECTION and billed is not None:
        return [use for use in uses if use.femto < 0 and use.corrects(billed)]
    return []


def line(invoice: Invoice, use: UsageLine) -> InvoiceLine:
    """Return the line of an invoice, or of a credit note with a positive amount."""
    sign = -1 if invoice.is_credit_note else 1
    return InvoiceLine(
        invoice=invoice,
        tenant_id=invoice.tenant_id,
        line_type=InvoiceLine.LineType.CREDIT if invoice.is_credit_note else InvoiceLine.LineType.USAGE,
        model=use.model,
        tier=use.tier,
        component=use.component,
        prompt_length_band=use.prompt_length_band,
        window=use.window,
        price_version=use.version,
        price_id=use.price_id,
        nano_per_million=use.nano_per_million,
        usage_month=use.usage_month,
        first_at=use.first_at,
        last_at=use.last_at,
        events=use.events,
        tokens=sign * use.tokens,
        femto=sign * use.femto,
        cents=cents(sign * use.femto, invoice.currency),
        shares=_describe_shares(invoice, use),
    )


def _describe_shares(invoice: Invoice, use: UsageLine) -> list[dict[str, Any]] | None:
    labels = invoice.usage_labels
    if not labels or invoice.is_credit_note:
        return None
    return describe_shares(use.shares, use.nano_per_million, labels, invoice.currency)


def difference_line(note: Invoice, item: RatedDifference) -> InvoiceLine:
    """Return the line of a difference. Its price is the absolute difference of the prices.

    A line of metered usage has its amount in the description.
    """
    sign = 1 if (item.new_nano > item.old_nano) != note.is_credit_note else -1
    femto = -item.femto if note.is_credit_note else item.femto
    old, new = (f"{symbol(note.currency)}{decimal(nano, NANO_DIGITS, 2)}" for nano in (item.old_nano, item.new_nano))
    change = f"price corrected from {old} to {new} per million"
    if item.is_metered:
        return InvoiceLine(
            invoice=note,
            tenant_id=note.tenant_id,
            line_type=InvoiceLine.LineType.METERED,
            description=f"{metered_amount(Component(item.component), sign * item.tokens)}, {change}",
            model=item.model,
            component=item.component,
            first_at=item.first_at,
            last_at=item.last_at,
            femto=femto,
            cents=cents(femto, note.currency),
        )
    return InvoiceLine(
        invoice=note,
        tenant_id=note.tenant_id,
        line_type=InvoiceLine.LineType.CREDIT if note.is_credit_note else InvoiceLine.LineType.USAGE,
        description=change,
        model=item.model,
        tier=item.tier,
        component=item.component,
        prompt_length_band=item.from_tokens,
        window=window(item),
        price_version=item.version,
        price_id=item.price_id,
        nano_per_million=abs(item.new_nano - item.old_nano),
        first_at=item.first_at,
        last_at=item.last_at,
        events=item.events,
        tokens=sign * item.tokens,
        femto=femto,
        cents=cents(femto, note.currency),
    )


def usage_lines(
    invoice: Invoice, usage: Iterable[UsageLine], changed: Iterable[RatedDifference] = ()
) -> list[InvoiceLine]:
    """Return the lines of usage that belongs on a document, and of differences of re-ratings."""
    billed = None if invoice.refers_to is None else invoice.refers_to.period
    uses = select_usage(invoice.invoice_type, usage, billed)
    return [*(line(invoice, use) for use in uses), *(difference_line(invoice, item) for item in changed)]


def rerated_differences(note: Invoice) -> list[RatedDifference]:
    """Return the differences of re-ratings that are on a note.

    The note of a re-rating has the differences of its invoice. A correction has the differences of the usage that it
    reverses, for re-ratings that did not include the reversal.
    """
    if note.refers_to is None:
        return []
    rows = ReratedInvoice.objects.for_tenant(note.tenant_id)
    if note.invoice_type == Invoice.InvoiceType.CORRECTION:
        found: list[RatedDifference] = []
        later = rows.filter(invoice=note.refers_to).exclude(closed_periods__contains=[note.period_id])
        for rerating in Rerating.objects.filter(invoices__in=later).order_by("number"):
            found += differences(rerating, note.refers_to, [note.period_id], with_events=False)
        return found
    rerated = None if note.pk is None else rows.filter(note=note).select_related("rerating").first()
    if rerated is None or rerated.rerating is None:
        return []
    return differences(rerated.rerating, note.refers_to, rerated.closed_periods)
