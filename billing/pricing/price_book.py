"""What a price version proposes, checked, and what is compiled of the prices it sets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal, DecimalException, localcontext
from typing import Any

import msgspec
from django.db.models import Q

from billing.models import BookAssignment, CompiledSheet, Price, PriceBook
from billing.models.prices import MAX_NANO_PER_MILLION
from billing.pricing.pricing import COMPONENTS, MINUTES_A_DAY, NO_END, Component, Rate, Tier, encode_rates

MAX_NAME_LENGTH = 128
MAX_PRICES = 50_000  # in one proposal

Kind = tuple[str, Tier]  # a model in a service tier
_ORDER = {component: place for place, component in enumerate(COMPONENTS)}
_BATCH = 1000


class NewPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A price to be. Ranges are half-open; minutes are of the UTC day."""

    model: str
    tier: Tier
    component: Component
    nano_per_million: int
    from_tokens: int = 0
    until_tokens: int = NO_END
    from_minute: int = 0
    until_minute: int = MINUTES_A_DAY

    @property
    def kind(self) -> Kind:
        return self.model, self.tier


class Proposal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Every price, from a moment on, of the models and tiers it names; those withdrawn have none any more."""

    prices: tuple[NewPrice, ...] = ()
    withdrawn: tuple[Kind, ...] = ()

    @property
    def kinds(self) -> set[Kind]:
        return {price.kind for price in self.prices} | set(self.withdrawn)


def nano_per_million(usd_per_million: str | Decimal) -> int:
    """Return a price in USD per million tokens as whole nano-USD.

    Raises:
        ValueError: it is not a number, negative, not whole, or beyond any use.
    """
    try:
        with localcontext(prec=60):
            exact = Decimal(usd_per_million).scaleb(9)
            whole = int(exact)
    except (DecimalException, ValueError, OverflowError):
        raise ValueError(f"{usd_per_million!r} is not a number") from None
    if exact != whole:
        raise ValueError(f"{usd_per_million} is not a whole number of nano-USD")
    if not 0 <= whole <= MAX_NANO_PER_MILLION:
        raise ValueError(f"{usd_per_million} is out of range")
    return whole


def parse(body: Mapping[str, Any]) -> Proposal:
    """Return the proposal that a version's body holds.

    Raises:
        ValueError: it holds none; the message says why.
    """
    proposal = msgspec.convert(body, Proposal)
    if not proposal.kinds:
        raise ValueError("it sets no prices")
    if len(proposal.prices) > MAX_PRICES:
        raise ValueError(f"use at most {MAX_PRICES} prices")
    both = {price.kind for price in proposal.prices} & set(proposal.withdrawn)
    if both:
        raise ValueError(f"{min(both)[0]} is priced and withdrawn at once")
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
        raise ValueError(f"{price.model}: a band of prompt lengths starts before it ends")
    if not 0 <= price.from_minute < price.until_minute <= MINUTES_A_DAY:
        raise ValueError(f"{price.model}: a window starts before it ends, within a day (over midnight it is two)")


def _check_overlap(prices: Sequence[NewPrice]) -> None:
    same: dict[tuple[Kind, Component], list[NewPrice]] = defaultdict(list)
    for price in prices:
        same[price.kind, price.component].append(price)
    for (kind, component), rows in same.items():
        rows.sort(key=lambda price: price.from_tokens)
        for place, one in enumerate(rows):
            for other in rows[place + 1 :]:
                if other.from_tokens >= one.until_tokens:
                    break
                if one.from_minute < other.until_minute and other.from_minute < one.until_minute:
                    raise ValueError(f"{kind[0]} ({kind[1]}): two prices of {component} overlap")


def compile_sheets(book: PriceBook, tenant_id: int | None, kinds: Iterable[Kind], at: datetime) -> int:
    """Write again, for whomever it concerns, what the models and tiers cost from `at` on; returns how many sheets.

    For the caller that holds the price book's lock, inside `system(…)`.
    """
    wanted = set(kinds)
    prices, known = _prices(wanted, at), _known(wanted)
    books = dict(BookAssignment.objects.all_tenants().values_list("tenant_id", "book_id"))
    listed = PriceBook.objects.get_or_create(name=PriceBook.LIST)[0].pk
    sheets = []
    for kind in sorted(wanted):
        for owner in _owners(book, tenant_id, kind, known, books, listed):
            stack = [*prices[None, books.get(owner or 0, listed), kind]]
            if owner is not None:
                stack = [*prices[owner, listed, kind], *stack]  # a tenant's own prices are in the list's book
            moments = {at, *known[owner, kind]}
            moments |= {end for row in stack for end in (row.effective_from, row.effective_until) if end}
            sheets += [_sheet(owner, kind, moment, stack) for moment in sorted(moments) if moment >= at]
    CompiledSheet.objects.bulk_create(sheets, batch_size=_BATCH)
    return len(sheets)


def _prices(kinds: set[Kind], at: datetime) -> dict[tuple[int | None, int, Kind], list[Price]]:
    """Rows active at `at` or later, by whose they are, book and kind."""
    found: dict[tuple[int | None, int, Kind], list[Price]] = defaultdict(list)
    rows = Price.objects.filter(Q(effective_until__isnull=True) | Q(effective_until__gt=at), model__in=_models(kinds))
    for row in rows:
        found[row.tenant_id, row.book_id, (row.model, Tier(row.tier))].append(row)
    return found


def _known(kinds: set[Kind]) -> dict[tuple[int | None, Kind], set[datetime]]:
    """When each owner's sheets of each kind begin."""
    found: dict[tuple[int | None, Kind], set[datetime]] = defaultdict(set)
    rows = CompiledSheet.objects.filter(model__in=_models(kinds))
    for owner, model, tier, since in rows.values_list("tenant_id", "model", "tier", "effective_from"):
        found[owner, (model, Tier(tier))].add(since)
    return found


def _models(kinds: set[Kind]) -> list[str]:
    return sorted({model for model, _ in kinds})


def _owners(
    book: PriceBook,
    tenant_id: int | None,
    kind: Kind,
    known: Mapping[tuple[int | None, Kind], set[datetime]],
    books: Mapping[int, int],
    listed: int,
) -> list[int | None]:
    """Whose sheets change. NOTE: a tenant with another book needs a sheet, if an empty one, of all that is on the list:
    without one the list's would count."""
    if tenant_id is not None:
        return [tenant_id]
    if book.pk != listed:
        return [tenant for tenant, other in sorted(books.items()) if other == book.pk]
    tenants = {owner for owner, of in known if of == kind and owner is not None} | books.keys()
    return [None, *sorted(tenants)]


def _sheet(owner: int | None, kind: Kind, at: datetime, stack: Iterable[Price]) -> CompiledSheet:
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
    model, tier = kind
    return CompiledSheet(tenant_id=owner, model=model, tier=tier, effective_from=at, rates=encode_rates(tuple(rates)))


def _covers(one: Rate, other: Rate) -> bool:
    """Wherever the other applies, the one does."""
    tokens = one.from_tokens <= other.from_tokens and other.until_tokens <= one.until_tokens
    minutes = one.from_minute <= other.from_minute and other.until_minute <= one.until_minute
    return one.component == other.component and tokens and minutes


def in_force(tenant_id: int, at: datetime, model: str | None = None) -> list[NewPrice]:
    """Return what the tenant pays at that moment, of one model or all; the tenant's scope, or everybody's, must be
    open."""
    rows = CompiledSheet.objects.filter(Q(tenant_id=tenant_id) | Q(tenant_id=None), effective_from__lte=at)
    if model is not None:
        rows = rows.filter(model=model)
    newest = rows.order_by("tenant_id", "model", "tier", "-effective_from", "-pk").distinct(
        "tenant_id", "model", "tier"
    )
    found: dict[Kind, CompiledSheet] = {}
    for row in newest:
        kind = row.model, Tier(row.tier)
        if row.tenant_id is not None or kind not in found:
            found[kind] = row
    return [
        NewPrice(*kind, rate.component, rate.nano_per_million, *_ranges(rate))
        for kind, row in sorted(found.items())
        for rate in row.decoded().rates
    ]


def _ranges(rate: Rate) -> tuple[int, int, int, int]:
    return rate.from_tokens, rate.until_tokens, rate.from_minute, rate.until_minute
