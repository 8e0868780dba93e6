"""What a tenant's months cost, computed once from stored usage and final prices, by code of its own.

The product computes lines, rounds each, and issues notes for what changes later. The oracle knows neither lines nor
documents: it adds up the months as they are now. It imports nothing of `billing` but `billing.models`, which
`test_imports.py` enforces. Amounts are fractions of the currency's minor unit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import date, datetime, timedelta
from fractions import Fraction
from math import floor
from typing import Any
from zoneinfo import ZoneInfo

from billing.models import (
    Adjustment,
    Commitment,
    MeteredUsage,
    OneOffLine,
    Period,
    Price,
    PriceTerm,
    Rerating,
    UsageEvent,
)
from tenants.models import AuditEntry

MINOR_UNITS = {"USD": 100, "EUR": 100, "JPY": 1}
PER_TOKEN = Fraction(1, 10**15)  # a price is in billionths of a unit per million tokens
MICROSECONDS_AN_HOUR = 3600 * 10**6
TOKENS = (
    *("uncached", "cache_read", "cache_write_5m", "cache_write_1h", "output"),
    *("answer_hit_input", "answer_hit_output", "searches"),
)  # the order of `price_ids`
PROMPT = ("uncached", "cache_read", "cache_write_5m", "cache_write_1h", "answer_hit_input")
NEVER = "9999-12"

Usage = dict[tuple[str, str, str], list[Any]]  # tokens and cost by model, service tier and component


def cost_of(tenant_id: int, closed: Iterable[Period], currency: str) -> Fraction:
    """Return what the tenant owes for closed months before tax and credit, in minor units."""
    months = sorted(closed, key=lambda month: month.starts_at)
    cost = sum((usage_cost(tenant_id, month, months, currency) for month in months), Fraction())
    last = months[-1].label if months else ""
    one_offs = list(OneOffLine.objects.for_tenant(tenant_id))
    cost += sum(row.cents for row in one_offs if not row.last_month and row.month <= last)
    for month in months:
        fees = [_prorate(row, month, row.fee) for row in Commitment.objects.for_tenant(tenant_id)]
        fees += [row.cents for row in one_offs if row.month <= month.label <= row.last_month]
        cost += 0 if is_deleted(tenant_id, month) else sum(fees)
    return cost


def owed_for(tenant_id: int, months: Iterable[Period], now: datetime, currency: str) -> Fraction:
    """Return what the tenant owes for months that are not invoiced, before tax and credit, in minor units.

    A minimum is owed from the end of its month on, all else from its start.
    """
    known = sorted(months, key=lambda month: month.starts_at)
    over = [month for month in known if month.ends_at <= now]
    cost = cost_of(tenant_id, [month for month in known if month.starts_at <= now], currency)
    for month in known:
        if month not in over:
            cost += usage_cost(tenant_id, month, known, currency, has_minimum=False)
            cost -= usage_cost(tenant_id, month, known, currency) if month.starts_at <= now else 0
    return cost


def usage_cost(
    tenant_id: int, month: Period, closed: Iterable[Period], currency: str, *, has_minimum: bool = True
) -> Fraction:
    """Return the cost of a month's usage under its price terms, in minor units.

    Args:
        closed: the months whose adjustments of this month's usage count.
    """
    terms = [row for row in PriceTerm.objects.for_tenant(tenant_id).order_by("pk") if _is_active(row, month)]
    rules = [row.rule for row in terms]
    periods = [each.pk for each in closed]
    usage = _usage(tenant_id, month, periods)
    for rule in rules:
        key = rule.get("model"), rule.get("tier", "standard"), rule.get("component")
        if rule["term_type"] in ("graduated", "volume") and key in usage:
            usage[key][1] = _tiered(rule, max(0, usage[key][0])) * PER_TOKEN
    for rule in rules:
        for (model, _, _), row in usage.items():
            if rule["term_type"] == "discount" and rule.get("model", "") in ("", model):
                row[1] *= 1 - Fraction(rule["ppm"], 10**6)
    units = sum((row[1] for row in usage.values()), Fraction()) + _metered(tenant_id, month, periods)
    minimums = [_prorate(row, month, row.rule["cents"]) for row in terms if row.rule["term_type"] == "minimum"]
    is_charged = has_minimum and minimums and not is_deleted(tenant_id, month)
    return max(units * MINOR_UNITS[currency], Fraction(max(minimums) if is_charged else 0))


def _usage(tenant_id: int, month: Period, closed: list[int]) -> Usage:
    """Return the month's usage at final prices, without what was reversed in a closed month."""
    events = {
        (row.admitted_at, row.request_id, row.execution): row
        for row in UsageEvent.objects.for_tenant(tenant_id).filter(invoice_period=month.pk)
    }
    changes = [(row, row) for row in events.values()]
    for row in Adjustment.objects.for_tenant(tenant_id).filter(invoice_period__in=closed):
        if event := events.get((row.admitted_at, row.request_id, row.execution)):
            changes.append((event, row))
    prices = Price.objects.in_bulk({pk for _, row in changes for pk in row.price_ids or () if pk})
    found: Usage = defaultdict(lambda: [0, Fraction()])
    for event, row in changes:
        prompt = sum(getattr(event, name) for name in PROMPT)
        for component, price_id in zip(TOKENS, row.price_ids or (), strict=False):
            if price_id and (tokens := getattr(row, component)):
                price = prices[price_id]
                sums = found[price.model, price.tier, component]
                sums[0] += tokens
                sums[1] += tokens * _final(price, row.admitted_at, prompt) * PER_TOKEN
    return found


def _metered(tenant_id: int, month: Period, closed: list[int]) -> Fraction:
    """Return the cost of the month's metered usage, without what was reversed in a closed month."""
    cost = Fraction()
    for row in MeteredUsage.objects.for_tenant(tenant_id).filter(invoice_period__in=closed).select_related("reverses"):
        if (row.reverses or row).invoice_period == month.pk:
            hours = Fraction((row.ended_at - row.started_at) // timedelta(microseconds=1), MICROSECONDS_AN_HOUR)
            price = Price.objects.get(pk=row.price_id)
            cost += row.amount * hours * _final(price, row.started_at, 0) * PER_TOKEN
    return cost


def _final(price: Price, at: datetime, prompt: int) -> int:
    """Return the price after all re-ratings. Each replaces the price of the one before it."""
    nano = price.nano_per_million
    same = Rerating.objects.filter(state="applied", book=price.book_id, tenant_id=price.tenant_id)
    for rerating in same.order_by("number"):
        for new in rerating.body["prices"]:
            names = (new["model"], new["tier"], new["component"])
            is_same = names == (price.model, price.tier, price.component)
            if is_same and rerating.starts_at <= at < rerating.ends_at and _applies(new, at, prompt):
                nano = new["nano_per_million"]
    return nano


def _applies(new: Mapping[str, Any], at: datetime, prompt: int) -> bool:
    local = at.astimezone(ZoneInfo(new.get("time_zone", "UTC")))
    ranges = (
        ("tokens", prompt, 2**31),
        ("minute", local.hour * 60 + local.minute, 1440),
        ("weekday", local.weekday(), 7),
    )
    return all(new.get(f"from_{name}", 0) <= value < new.get(f"until_{name}", end) for name, value, end in ranges)


def _tiered(rule: Mapping[str, Any], tokens: int) -> int:
    """Return the sum of the prices of a month's tokens. The first token is token 1 of the tier that starts at 0."""
    starts = [(tier["from_tokens"], tier["nano_per_million"]) for tier in rule["tiers"]]
    if rule["term_type"] == "volume":
        return int(tokens * next(nano for start, nano in reversed(starts) if start < tokens or start == 0))
    cost, left = 0, tokens
    for start, nano in reversed(starts):
        cost += max(0, left - start) * nano
        left = min(left, start)
    return cost


def _is_active(row: Any, month: Period) -> bool:
    return bool(row.first_month <= month.label <= (row.last_month or NEVER))


def _prorate(row: Any, month: Period, amount: int) -> int:
    """Return the part of an amount of a month: none before and after the charge, and half up in a first month."""
    if not _is_active(row, month):
        return 0
    if row.starts_on is None or f"{row.starts_on:%Y-%m}" != month.label:
        return amount
    year, number = map(int, month.label.split("-"))
    first, end = date(year, number, 1), date(year + number // 12, number % 12 + 1, 1)
    return floor(Fraction(amount * (end - row.starts_on).days, (end - first).days) + Fraction(1, 2))


def is_deleted(tenant_id: int, month: Period) -> bool:
    """Return whether the tenant was deleted from the start of the month to its end."""
    deleted_at: datetime | None = None
    for entry in AuditEntry.objects.for_tenant(tenant_id).filter(object_type="tenant").order_by("pk"):
        if entry.action == "tenant.deleted":
            deleted_at = entry.created_at
        elif entry.action == "tenant.restored":
            if deleted_at is not None and deleted_at <= month.starts_at and entry.created_at >= month.ends_at:
                return True
            deleted_at = None
    return deleted_at is not None and deleted_at <= month.starts_at
