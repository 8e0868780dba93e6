"""Parsing and validation of price versions, and compilation of rate cards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal, DecimalException, localcontext
from typing import Any

import msgspec
from django.db.models import Q

from billing.amounts import NANO_DIGITS
from billing.models import CompiledRateCard, Price, PriceBook, PriceBookAssignment
from billing.models.prices import MAX_NANO_PER_MILLION
from billing.pricing.pricing import COMPONENTS, MINUTES_A_DAY, NO_END, Component, Rate, Tier, encode_rates

MAX_NAME_LENGTH = 128
MAX_PRICES = 50_000  # in one proposal

ModelTier = tuple[str, Tier]  # a model in a service tier
_ORDER = {component: place for place, component in enumerate(COMPONENTS)}
_BATCH = 1000


class NewPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A proposed price. Ranges are half-open; minutes are of the UTC day."""

    model: str
    tier: Tier
    component: Component
    nano_per_million: int
    from_tokens: int = 0
    until_tokens: int = NO_END
    from_minute: int = 0
    until_minute: int = MINUTES_A_DAY

    @property
    def model_tier(self) -> ModelTier:
        return self.model, self.tier


class Proposal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All prices of the named models and tiers from a time on. Withdrawn models and tiers have no price any more."""

    prices: tuple[NewPrice, ...] = ()
    withdrawn: tuple[ModelTier, ...] = ()

    @property
    def model_tiers(self) -> set[ModelTier]:
        return {price.model_tier for price in self.prices} | set(self.withdrawn)


def nano_per_million(usd_per_million: str | Decimal) -> int:
    """Convert a price in USD per million tokens to whole nano-USD.

    Raises: ValueError if it is not a number, negative, not whole or too large.
    """
    try:
        with localcontext(prec=60):
            exact = Decimal(usd_per_million).scaleb(NANO_DIGITS)
            whole = int(exact)
    except (DecimalException, ValueError, OverflowError):
        raise ValueError(f"{usd_per_million!r} is not a number") from None
    if exact != whole:
        raise ValueError(f"{usd_per_million} is not a whole number of nano-USD")
    if not 0 <= whole <= MAX_NANO_PER_MILLION:
        raise ValueError(f"{usd_per_million} is out of range")
    return whole


def parse(body: Mapping[str, Any]) -> Proposal:
    """Parse the proposal in a version's body.

    Raises: ValueError with the reason if it is invalid.
    """
    proposal = msgspec.convert(body, Proposal)
    if not proposal.model_tiers:
        raise ValueError("the version sets no prices")
    if len(proposal.prices) > MAX_PRICES:
        raise ValueError(f"use at most {MAX_PRICES} prices")
    both = {price.model_tier for price in proposal.prices} & set(proposal.withdrawn)
    if both:
        raise ValueError(f"{min(both)[0]} is both priced and withdrawn")
    for price in proposal.prices:
        _check(price)
    _check_overlap(proposal.prices)
    return proposal


def _check(price: NewPrice) -> None:
    if not 0 < len(price.model) <= MAX_NAME_LENGTH:
        raise ValueError(f"expected a model name of 1 to {MAX_NAME_LENGTH} characters, not {price.model!r}")
    if not 0 <= price.nano_per_million <= MAX_NANO_PER_MILLION:
        raise ValueError(f"{price.model}: {price.component} is out of range")
    if not 0 <= price.from_tokens < price.until_tokens <= NO_END:
        raise ValueError(f"{price.model}: a range of prompt lengths must start before it ends")
    if not 0 <= price.from_minute < price.until_minute <= MINUTES_A_DAY:
        raise ValueError(f"{price.model}: a time range must start before it ends on the same day; split it at midnight")


def _check_overlap(prices: Sequence[NewPrice]) -> None:
    same: dict[tuple[ModelTier, Component], list[NewPrice]] = defaultdict(list)
    for price in prices:
        same[price.model_tier, price.component].append(price)
    for (model_tier, component), rows in same.items():
        rows.sort(key=lambda price: price.from_tokens)
        for place, one in enumerate(rows):
            for other in rows[place + 1 :]:
                if other.from_tokens >= one.until_tokens:
                    break
                if one.from_minute < other.until_minute and other.from_minute < one.until_minute:
                    raise ValueError(f"{model_tier[0]} ({model_tier[1]}): two prices of {component} overlap")


def compile_rate_cards(book: PriceBook, tenant_id: int | None, model_tiers: Iterable[ModelTier], at: datetime) -> int:
    """Compile rate cards of the models and tiers from `at` on, for every owner affected. Return how many.

    The caller must have the price book's lock, inside `all_tenants_scope(…)`.
    """
    wanted = set(model_tiers)
    prices, known = _prices(wanted, at), _known(wanted)
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


def _known(model_tiers: set[ModelTier]) -> dict[tuple[int | None, ModelTier], set[datetime]]:
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
            row.from_tokens,
            row.until_tokens,
            row.from_minute,
            row.until_minute,
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
    return rate.component == other.component and tokens and minutes


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
        NewPrice(*model_tier, rate.component, rate.nano_per_million, *_ranges(rate))
        for model_tier, row in sorted(found.items())
        for rate in row.decoded().rates
    ]


def _ranges(rate: Rate) -> tuple[int, int, int, int]:
    return rate.from_tokens, rate.until_tokens, rate.from_minute, rate.until_minute
