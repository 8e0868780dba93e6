"""Comparison of past usage at current and at proposed prices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from billing.metering.partitions import month_of
from billing.models import CompiledRateCard, ExecutionOutcome, PriceVersion, UsageEvent
from billing.pricing.prices import rate_cards_to_be
from billing.pricing.rating import rate_cards
from billing.rates.pricing import PriceIndex, RateCard, Tier, UnknownPriceError, price
from inference_worker.contract.request import TOKEN_COLUMNS, TokenCounts
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

_BATCH = 5000
_NO_RATE_CARD = RateCard(0, None, "", Tier.STANDARD, 0, ())


@dataclass
class Comparison:
    """A tenant's usage of a model, at the charged and at the proposed prices."""

    tenant_id: int
    model: str
    events: int = 0
    was_femto: int = 0
    would_be_femto: int = 0
    unpriced: int = 0  # events that would have been rejected without a price; in neither sum


def last_month(now: datetime | None = None) -> tuple[datetime, datetime]:
    """Return the UTC month before this one, half-open."""
    end = datetime.combine(month_of(now or datetime.now(UTC)), datetime.min.time(), UTC)
    return datetime.combine(month_of(end - timedelta(days=1)), datetime.min.time(), UTC), end


def preview(draft: PriceVersion, start: datetime, end: datetime) -> list[Comparison]:
    """Return the usage of all tenants that the draft's prices would apply to, by tenant and model. Times are half-open.

    Raises:
        Conflict: it is no draft any more, or a later version is in its way.
    """
    to_be = rate_cards_to_be(draft)
    touched, models = (
        {(rate_card.tenant_id, rate_card.model, rate_card.tier) for rate_card in to_be},
        {rate_card.model for rate_card in to_be},
    )
    from_then = max((rate_card.effective_from for rate_card in to_be), default=0)
    index = PriceIndex()
    comparisons: dict[tuple[int, str], Comparison] = {}
    with all_tenants_scope(BypassReason.PRICES):
        index.add(row.decode() for row in CompiledRateCard.objects.filter(model__in=models).order_by("pk"))
        index.add(to_be)
        for tenant, model, tier, at, usage, was in _executions(models, start, end):
            if not {(tenant, model, tier), (None, model, tier)} & touched:
                continue
            rate_card = index.find(tenant, model, tier, from_then) or _NO_RATE_CARD
            row = comparisons.setdefault((tenant, model), Comparison(tenant, model))
            row.events += 1
            try:
                would_be = price(rate_card, usage, at).cost_femto
            except UnknownPriceError:
                row.unpriced += 1
                continue
            row.was_femto += was
            row.would_be_femto += would_be
    return [comparisons[key] for key in sorted(comparisons)]


def _executions(
    models: set[str], start: datetime, end: datetime
) -> Iterator[tuple[int, str, Tier, int, TokenCounts, int]]:
    """Yield every priced execution: tenant, model, tier, microsecond of admission, tokens and cost."""
    rows = (
        UsageEvent.objects.all_tenants()
        .filter(admitted_at__gte=start, admitted_at__lt=end, model__in=models, price_version__isnull=False)
        .exclude(outcome=ExecutionOutcome.FAILED)
        .values_list("tenant_id", "model", "price_version", "admitted_at", "cost_femto", *TOKEN_COLUMNS)
    )
    for tenant, model, version, admitted_at, cost, *tokens in rows.iterator(_BATCH):
        known = rate_cards([version])
        tier = known[version].tier if version in known else _NO_RATE_CARD.tier
        at = (admitted_at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        yield tenant, model, tier, at, TokenCounts(*tokens), int(cost)
