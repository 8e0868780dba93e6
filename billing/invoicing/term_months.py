"""The usage that an amount pays under a tenant's price terms, at the prices that admissions pin."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple
from zoneinfo import ZoneInfo

from django.db.models import Q, QuerySet

from billing.invoicing.due_months import DueMonth
from billing.invoicing.term_lines import terms_of, usage_of
from billing.models import CompiledRateCard, Period, PriceTerm
from billing.periods import close_after, month_bounds
from billing.rates.own_prices import TermMonth, compute_affordable
from billing.rates.terms import TermRule, UsageKey

# The terms of a month and new prices count this long before they apply. So nothing is leased at a lower price, however
# late the limit is computed.
LEAD = timedelta(minutes=5)


class AffordableUsage(NamedTuple):
    """The usage at pinned prices that an amount pays, in femto-units."""

    femto: int
    is_exact: bool  # False: usage at a lower price than expected leaves a rest to compute again
    changes_at: datetime | None  # when the terms of the next month count, or those of this month end


def find_affordable(available: int, tenant_id: int, months: Iterable[DueMonth], now: datetime) -> AffordableUsage:
    """Return the usage at pinned prices that an amount pays, in the months whose usage may still increase."""
    if not PriceTerm.objects.for_tenant(tenant_id).exists():
        return AffordableUsage(available, True, None)
    found, changes_at = [], None
    for month in months:
        period = month.period
        if period.closed_at is None and now < period.ends_at + close_after():
            found.append(TermMonth(_rules(period, tenant_id), usage_of(month.lines)))
        if period.starts_at <= now < period.ends_at:
            counts_from = period.ends_at - LEAD
            changes_at = counts_from if now < counts_from else period.ends_at
            if now >= counts_from:
                found.append(TermMonth(_rules(_month_after(period), tenant_id), {}))
    rules = [rule for month in found for rule in month.rules]
    models = _priced_models({rule.model for rule in rules if rule.ppm and rule.model}, tenant_id)
    prices = _lowest_prices({(rule.model, str(rule.tier)) for rule in rules if rule.tiers}, tenant_id, now)
    usage = compute_affordable(available, found, models, prices)
    return AffordableUsage(usage.femto, usage.is_exact, changes_at)


def _rules(period: Period, tenant_id: int) -> list[TermRule]:
    return [term.rule_in(period.label) for term in terms_of(period, tenant_id)]


def _month_after(period: Period) -> Period:
    """Return the next month, which is not stored."""
    zone = period.entity.time_zone
    first = period.ends_at.astimezone(ZoneInfo(zone))
    starts_at, ends_at = month_bounds(zone, first.year, first.month)
    return Period(entity=period.entity, label=f"{first:%Y-%m}", starts_at=starts_at, ends_at=ends_at)


def _rate_cards(tenant_id: int) -> QuerySet[CompiledRateCard]:
    return CompiledRateCard.objects.filter(Q(tenant_id=tenant_id) | Q(tenant_id=None))


def _priced_models(named: Collection[str], tenant_id: int) -> set[str]:
    """Return the named models that have prices, and "" if others have."""
    if not named:
        return {""}
    rows = _rate_cards(tenant_id)
    found = set(rows.filter(model__in=named).values_list("model", flat=True))
    return found | ({""} if rows.exclude(model__in=named).exists() else set())


def _lowest_prices(model_tiers: Collection[tuple[str, str]], tenant_id: int, now: datetime) -> Mapping[UsageKey, int]:
    """Return the lowest price of each component of these models and tiers that an admission may have pinned or pin."""
    if not model_tiers:
        return {}
    models = {model for model, _ in model_tiers}
    rows = _rate_cards(tenant_id).filter(model__in=models, effective_from__lte=now + LEAD)
    owned: dict[tuple[str, str], dict[int | None, list[CompiledRateCard]]] = defaultdict(lambda: defaultdict(list))
    for row in rows.order_by("effective_from", "pk"):
        owned[row.model, row.tier][row.tenant_id].append(row)
    since = now - close_after()  # the admissions before are settled
    found: dict[UsageKey, int] = {}
    for (model, tier), by_owner in owned.items():
        own = by_owner[tenant_id]
        cards = _from(own, since)
        if not own or own[0].effective_from > since:
            cards += _from(by_owner[None], since)
        for card in cards if (model, tier) in model_tiers else ():
            for rate in card.decode().rates:
                key = model, tier, str(rate.component)
                found[key] = min(found.get(key, rate.nano_per_million), rate.nano_per_million)
    return found


def _from(cards: Sequence[CompiledRateCard], since: datetime) -> list[CompiledRateCard]:
    """Return the rate card of that time and the later ones, of cards in the order of their times."""
    before = [card for card in cards if card.effective_from <= since]
    return [*before[-1:], *(card for card in cards if card.effective_from > since)]
