"""What a past month would cost at proposed prices, by the function of what a month costs.

Each tenant's usage of the month is charged twice: as it was, and with the proposed prices in place of those that they
would end. So tiers, discounts and minimums count. Of many tenants, those with the highest usage of the models are
computed. Metered usage, fees and one-off lines are the same in both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from django.db import connection

from billing.invoicing.line_sources import MonthDraft
from billing.invoicing.lines import UsageLine
from billing.invoicing.month_charges import month_charges
from billing.invoicing.month_usage import read_usage
from billing.metering.archives import require_usage
from billing.models import (
    BillingEntity,
    BillingProfile,
    Invoice,
    InvoiceLine,
    Period,
    Price,
    PriceBook,
    PriceBookAssignment,
)
from billing.pricing.currencies import currency_of
from billing.rates.price_book import NewPrice, PriceRanges, Proposal, ranges_of
from billing.rates.pricing import Component
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant

MAX_TENANTS = 50  # computed; the others are counted
_KINDS = InvoiceLine.LineType
_OF_USAGE = (_KINDS.USAGE, _KINDS.METERED, _KINDS.TERM)
# The cost of models by tenant: sums of months, or of days while these are not complete, and what was settled since.
_USED = """
SELECT tenant_id, sum(cost_femto) FROM (
    SELECT tenant_id, cost_femto FROM billing_usagerollup
    WHERE bucket = billing_rollup_coarse('month', billing_rollup_bucket('day'))
        AND start >= %(start)s AND start < %(end)s AND model = ANY(%(models)s)
        AND (%(tenant)s::bigint IS NULL OR tenant_id = %(tenant)s)
    UNION ALL
    SELECT tenant_id, cost_femto FROM billing_usagechange
    WHERE settled_at >= billing_rollup_settled_before() AND admitted_at >= %(start)s AND admitted_at < %(end)s
        AND model = ANY(%(models)s) AND (%(tenant)s::bigint IS NULL OR tenant_id = %(tenant)s)
) used GROUP BY tenant_id ORDER BY 2 DESC, 1
"""


@dataclass(frozen=True)
class TenantProjection:
    """A tenant's usage of the month with its price terms, before tax, in the minor unit of its currency."""

    tenant: Tenant
    was: int
    would_be: int

    @property
    def change(self) -> int:
        return self.would_be - self.was


@dataclass(frozen=True)
class Projection:
    """The month at the proposed prices. `tenants` has the largest change first.

    `others` is the number of tenants with usage of the models that are not computed, and `covered` the part of that
    usage which is. `unpriced` counts the tokens and searches that would be rejected without a price; they are in
    neither sum. `kept` counts those whose price stays as charged, since the proposed ones have other ranges.
    """

    month: str
    tenants: tuple[TenantProjection, ...]
    currency: str
    others: int = 0
    covered: float = 1.0
    unpriced: int = 0
    kept: int = 0

    @property
    def was(self) -> int:
        return sum(row.was for row in self.tenants)

    @property
    def would_be(self) -> int:
        return sum(row.would_be for row in self.tenants)

    @property
    def change(self) -> int:
        return self.would_be - self.was


@dataclass
class _Left:
    """Usage that the proposed prices do not replace, in tokens and searches."""

    unpriced: int = 0
    kept: int = 0


def month_before(now: datetime) -> str:
    """Return the last complete month, in UTC."""
    last = now.astimezone(UTC).year * 12 + now.astimezone(UTC).month - 2
    return f"{last // 12:04}-{last % 12 + 1:02}"


def project_month(proposal: Proposal, book: PriceBook, tenant_id: int | None, month: str) -> Projection:
    """Return what a month would have cost the tenants of a price book, or one tenant, at proposed prices.

    Args:
        tenant_id: the tenant whose own prices are proposed. None: the book's.
        month: such as 2026-10, by the clocks of each tenant's billing entity.

    Raises:
        Conflict: usage of the month is archived.
    """
    with all_tenants_scope(BypassReason.PRICES):
        currency = book.currency if tenant_id is None else currency_of(tenant_id)
        used = _find_used(proposal, book, tenant_id, month)
        computed = dict(list(used.items())[:MAX_TENANTS])
        left, rows = _Left(), []
        for tenant in Tenant.objects.all_tenants().filter(pk__in=list(computed)).order_by("pk"):
            row = _project(proposal, tenant, tenant_id is not None, month, left)
            rows += [] if row is None else [row]
    rows.sort(key=lambda row: (-abs(row.change), row.tenant.pk))
    total = sum(used.values())
    covered = sum(computed.values()) / total if total else 1.0
    return Projection(month, tuple(rows), currency, len(used) - len(computed), covered, left.unpriced, left.kept)


def _find_used(proposal: Proposal, book: PriceBook, tenant_id: int | None, month: str) -> dict[int, int]:
    """Return the tenants that used the models in the month, with the cost of this usage, the highest first."""
    start = datetime.strptime(month, "%Y-%m").replace(tzinfo=UTC)
    end = start.replace(year=start.year + start.month // 12, month=start.month % 12 + 1)
    models = sorted({model for model, _ in proposal.model_tiers})
    books = dict(PriceBookAssignment.objects.all_tenants().values_list("tenant_id", "book__name"))
    with connection.cursor() as cursor:
        cursor.execute(_USED, {"start": start, "end": end, "models": models, "tenant": tenant_id})
        return {
            tenant: int(cost)
            for tenant, cost in cursor.fetchall()
            if tenant_id is not None or books.get(tenant, PriceBook.LIST) == book.name
        }


def _project(proposal: Proposal, tenant: Tenant, is_own: bool, month: str, left: _Left) -> TenantProjection | None:
    """Return a tenant's month at the charged and at the proposed prices. None: it has no such billing period."""
    profile = BillingProfile.objects.for_tenant(tenant).select_related("entity").first()
    entity = profile.entity if profile else BillingEntity.objects.filter(slug="default").first()
    period = Period.objects.select_related("entity").filter(entity=entity, label=month).first()
    if period is None:
        return None
    usage = read_usage([period], tenant.pk)[period.pk]
    require_usage(period.pk)
    charged = Price.objects.in_bulk({use.price_id for use in usage})
    was, would_be = [], []
    for use in usage:
        new = _replace(use, charged[use.price_id], proposal, is_own, left)
        if new is not None:
            was.append(use)
            would_be.append(new)
    invoice = Invoice(tenant=tenant, entity=period.entity, period=period, currency=currency_of(tenant.pk))
    return TenantProjection(tenant, _charge(invoice, was), _charge(invoice, would_be))


def _charge(invoice: Invoice, usage: Iterable[UsageLine]) -> int:
    """Return what usage costs in a month with its price terms, rounded as on an invoice."""
    lines = month_charges(MonthDraft(invoice, list(usage)))
    return sum(line.cents for line in lines if line.line_type in _OF_USAGE)


def _replace(use: UsageLine, charged: Price, proposal: Proposal, is_own: bool, left: _Left) -> UsageLine | None:
    """Return the usage at the proposed price, or as it was. None: it would have no price."""
    if (charged.model, charged.tier) not in proposal.model_tiers or (charged.tenant_id is not None and not is_own):
        return use
    prices = [price for price in proposal.prices if _is_for(price, charged) and _overlaps(price.ranges, charged)]
    if len(prices) == 1 and _covers(prices[0].ranges, charged):
        nano = prices[0].nano_per_million
        return use._replace(nano_per_million=nano, femto=use.tokens * nano)
    if prices or is_own:  # without an own price, the book's applies
        left.kept += use.tokens
        return use
    if Component(charged.component).is_optional:
        return use._replace(nano_per_million=0, femto=0)
    left.unpriced += use.tokens
    return None


def _is_for(price: NewPrice, charged: Price) -> bool:
    return (price.model, price.tier, price.component) == (charged.model, charged.tier, charged.component)


def _overlaps(ranges: PriceRanges, charged: Price) -> bool:
    """Return whether both prices apply to some prompt at some time. Clocks of other zones may overlap at any time."""
    other = ranges_of(charged)
    lengths = ranges.from_tokens < other.until_tokens and other.from_tokens < ranges.until_tokens
    if ranges.time_zone != other.time_zone:
        return lengths
    minutes = ranges.from_minute < other.until_minute and other.from_minute < ranges.until_minute
    days = ranges.from_weekday < other.until_weekday and other.from_weekday < ranges.until_weekday
    return lengths and minutes and days


def _covers(ranges: PriceRanges, charged: Price) -> bool:
    """Return whether the proposed price applies wherever the charged one did."""
    other = ranges_of(charged)
    lengths = ranges.from_tokens <= other.from_tokens and other.until_tokens <= ranges.until_tokens
    if ranges[2:] == PriceRanges()[2:]:
        return lengths
    minutes = ranges.from_minute <= other.from_minute and other.until_minute <= ranges.until_minute
    days = ranges.from_weekday <= other.from_weekday and other.until_weekday <= ranges.until_weekday
    return lengths and minutes and days and ranges.time_zone == other.time_zone
