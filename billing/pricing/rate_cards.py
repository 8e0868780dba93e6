"""Compilation of rate cards from published prices, and the current prices of a tenant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime

from django.db.models import Q

from billing.models import CompiledRateCard, Price, PriceBook, PriceBookAssignment
from billing.rates.price_book import ModelTier, NewPrice, PriceRanges, ranges_of
from billing.rates.pricing import (
    Component,
    PriceIndex,
    Rate,
    Tier,
    UnknownPriceError,
    encode_rates,
    reservation_nano,
)

_ORDER = {component: place for place, component in enumerate(Component)}
_BATCH = 1000


def compile_rate_cards(book: PriceBook, tenant_id: int | None, model_tiers: Iterable[ModelTier], at: datetime) -> int:
    """Compile rate cards of the models and tiers from `at` on, for every owner affected. Return how many.

    The caller must have the price book's lock, inside `all_tenants_scope(…)`.
    """
    wanted = set(model_tiers)
    prices, known = _prices(wanted, at), _find_start_times(wanted)
    books = dict(PriceBookAssignment.objects.all_tenants().values_list("tenant_id", "book_id"))
    listed = PriceBook.objects.get_or_create(name=PriceBook.LIST)[0].pk
    rate_cards = []
    for model_tier in sorted(wanted):
        for owner in _owners(book, tenant_id, model_tier, known, books, listed):
            stack = [*prices[None, books.get(owner or 0, listed), model_tier]]
            if owner is not None:
                stack = [*prices[owner, listed, model_tier], *stack]  # a tenant's own prices are in the book `list`
            moments = {at, *known[owner, model_tier]}
            moments |= {end for row in stack for end in (row.effective_from, row.effective_until) if end}
            rate_cards += [_rate_card(owner, model_tier, moment, stack) for moment in sorted(moments) if moment >= at]
    CompiledRateCard.objects.bulk_create(rate_cards, batch_size=_BATCH)
    return len(rate_cards)


def _prices(model_tiers: set[ModelTier], at: datetime) -> dict[tuple[int | None, int, ModelTier], list[Price]]:
    """Return the rows active at `at` or later, by tenant, book, and model and tier."""
    found: dict[tuple[int | None, int, ModelTier], list[Price]] = defaultdict(list)
    rows = Price.objects.filter(
        Q(effective_until__isnull=True) | Q(effective_until__gt=at), model__in=_models(model_tiers)
    )
    for row in rows:
        found[row.tenant_id, row.book_id, (row.model, Tier(row.tier))].append(row)
    return found


def _find_start_times(model_tiers: set[ModelTier]) -> dict[tuple[int | None, ModelTier], set[datetime]]:
    """Return the start times of each owner's rate cards, by model and tier."""
    found: dict[tuple[int | None, ModelTier], set[datetime]] = defaultdict(set)
    rows = CompiledRateCard.objects.filter(model__in=_models(model_tiers))
    for owner, model, tier, since in rows.values_list("tenant_id", "model", "tier", "effective_from"):
        found[owner, (model, Tier(tier))].add(since)
    return found


def _models(model_tiers: set[ModelTier]) -> list[str]:
    return sorted({model for model, _ in model_tiers})


def _owners(
    book: PriceBook,
    tenant_id: int | None,
    model_tier: ModelTier,
    known: Mapping[tuple[int | None, ModelTier], set[datetime]],
    books: Mapping[int, int],
    listed: int,
) -> list[int | None]:
    """Return the owners whose rate cards change. NOTE: a tenant with another book needs a rate card of every model on
    the list, even an empty one, because the list's rate card would apply without it.
    """
    if tenant_id is not None:
        return [tenant_id]
    if book.pk != listed:
        return [tenant for tenant, other in sorted(books.items()) if other == book.pk]
    tenants = {owner for owner, of in known if of == model_tier and owner is not None} | books.keys()
    return [None, *sorted(tenants)]


def _rate_card(owner: int | None, model_tier: ModelTier, at: datetime, stack: Iterable[Price]) -> CompiledRateCard:
    rates = [
        Rate(
            row.pk,
            Component(row.component),
            row.nano_per_million,
            *ranges_of(row),
        )
        for row in stack
        if row.effective_from <= at and (row.effective_until is None or at < row.effective_until)
    ]
    own = {row.pk for row in stack if row.tenant_id is not None}
    rates.sort(key=lambda r: (r.price_id not in own, _ORDER[r.component], r.from_tokens, r.from_minute))
    rates = [rate for place, rate in enumerate(rates) if not any(_covers(first, rate) for first in rates[:place])]
    model, tier = model_tier
    return CompiledRateCard(
        tenant_id=owner, model=model, tier=tier, effective_from=at, rates=encode_rates(tuple(rates))
    )


def _covers(rate: Rate, other: Rate) -> bool:
    """Return whether the one applies wherever the other does."""
    tokens = rate.from_tokens <= other.from_tokens and other.until_tokens <= rate.until_tokens
    minutes = rate.from_minute <= other.from_minute and other.until_minute <= rate.until_minute
    days = rate.from_weekday <= other.from_weekday and other.until_weekday <= rate.until_weekday
    always = ranges_of(rate)[2:] == PriceRanges()[2:]
    same_clocks = always or rate.time_zone == other.time_zone
    return rate.component == other.component and tokens and minutes and days and same_clocks


def priced_models(tenant_id: int, tasks: Mapping[str, str], at: datetime) -> set[str]:
    """Return the models whose requests gateways can price for the tenant at that time, in the standard tier.

    The tenant's scope or an all-tenants scope must be open.

    Args:
        tasks: the task of each model. An encoder has neither output nor a cache.
    """
    rows = CompiledRateCard.objects.filter(
        Q(tenant_id=tenant_id) | Q(tenant_id=None), model__in=tasks, tier=Tier.STANDARD, effective_from__lte=at
    )
    index = PriceIndex()
    index.add(row.decode() for row in rows.order_by("pk"))
    microsecond = round(at.timestamp() * 1e6)
    found = set()
    for model, task in tasks.items():
        rate_card = index.find(tenant_id, model, Tier.STANDARD, microsecond)
        try:
            if rate_card is not None:
                reservation_nano(rate_card, 1, 1, microsecond, n=int(task == "generate"))
                found.add(model)
        except UnknownPriceError:
            continue
    return found


def current_prices(tenant_id: int, at: datetime, model: str | None = None) -> list[NewPrice]:
    """Return the tenant's prices at that time, of one model or all. The tenant's scope or an all-tenants scope must be
    open.
    """
    rows = CompiledRateCard.objects.filter(Q(tenant_id=tenant_id) | Q(tenant_id=None), effective_from__lte=at)
    if model is not None:
        rows = rows.filter(model=model)
    newest = rows.order_by("tenant_id", "model", "tier", "-effective_from", "-pk").distinct(
        "tenant_id", "model", "tier"
    )
    found: dict[ModelTier, CompiledRateCard] = {}
    for row in newest:
        model_tier = row.model, Tier(row.tier)
        if row.tenant_id is not None or model_tier not in found:
            found[model_tier] = row
    return [
        NewPrice(model, tier, rate.component, rate.nano_per_million, *ranges_of(rate))
        for (model, tier), row in sorted(found.items())
        for rate in row.decode().rates
    ]
