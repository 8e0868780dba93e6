"""The active and announced prices of a tenant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from django.db.models import Q
from django.utils.dates import WEEKDAYS_ABBR
from django.utils.translation import gettext as _

from billing.models import CompiledRateCard
from billing.pricing.rate_cards import current_prices
from billing.rates.price_book import NewPrice, PriceRanges
from billing.rates.pricing import DAYS_A_WEEK, MINUTES_A_DAY, NO_END, Component, Tier
from frontend.core.backend_messages import translate_lazily
from frontend.core.languages import lazy_text as _lazy
from frontend.core.lists import text_param
from frontend.core.numbers import Money, exact
from frontend.core.page_context import PageContext

MAX_CHANGES = 12
COLUMNS = tuple((component, translate_lazily(component.label)) for component in Component)
TIERS = {
    Tier.STANDARD: _lazy("Standard"),
    Tier.BATCH: _lazy("Batch"),
    Tier.FLEX: _lazy("Flex"),
    Tier.PRIORITY: _lazy("Priority"),
}


@dataclass(frozen=True)
class PriceCell:
    label: str  # label of the column
    price: Money | None


@dataclass(frozen=True)
class PriceRow:
    """The prices of a tier, for one range of prompt lengths and hours if prices depend on these."""

    tier: str
    when: str  # empty if it always applies
    cells: tuple[PriceCell, ...]


@dataclass(frozen=True)
class PriceModel:
    name: str
    rows: tuple[PriceRow, ...]


def prices(ctx: PageContext) -> dict[str, Any]:
    """Return all active prices of the tenant, and announced changes."""
    tenant = ctx.tenant.pk
    now = current_prices(tenant, ctx.now)
    ahead = [(at, only, current_prices(tenant, at)) for at, only in _find_changes(tenant, ctx.now)]
    typed = text_param(ctx, "q")
    if typed:
        now = [price for price in now if typed.lower() in price.model.lower()]
        ahead = [(at, {name for name in only if typed.lower() in name.lower()}, found) for at, only, found in ahead]
        ahead = [change for change in ahead if change[1]]
    there = {price.component for found in (now, *(found for _, _, found in ahead)) for price in found}
    columns = [column for column in COLUMNS if column[0] in there]
    changes = [(at, models_of([price for price in found if price.model in only], columns)) for at, only, found in ahead]
    return {
        "columns": [label for _, label in columns],
        "models": models_of(now, columns),
        "changes": changes,
        "typed": typed,
    }


def _find_changes(tenant: int, now: datetime) -> list[tuple[datetime, set[str]]]:
    """Return the times at which prices change, with the affected models."""
    rows = CompiledRateCard.objects.filter(Q(tenant_id=tenant) | Q(tenant_id=None), effective_from__gt=now)
    found: dict[datetime, set[str]] = defaultdict(set)
    for at, model in rows.order_by("effective_from").values_list("effective_from", "model"):
        found[at].add(model)
    return list(found.items())[:MAX_CHANGES]


def models_of(
    found: Iterable[NewPrice], columns: list[tuple[Component, str]], currency: str = ""
) -> tuple[PriceModel, ...]:
    """Return the prices as rows of a table, in a currency or that of the page."""
    by_model: dict[str, list[NewPrice]] = defaultdict(list)
    for price in found:
        by_model[price.model].append(price)
    return tuple(PriceModel(name, tuple(_rows(rows, columns, currency))) for name, rows in by_model.items())


def _rows(found: list[NewPrice], columns: list[tuple[Component, str]], currency: str) -> Iterable[PriceRow]:
    """Return one row for each tier, or for each range of prompt lengths and hours in which its prices differ."""
    for tier, label in TIERS.items():
        tier_prices = [price for price in found if price.tier == tier]
        for place, costs in _ranges(tier_prices, [component for component, _label in columns]):
            cells = (
                PriceCell(name, None if nano is None else Money.nano(nano, currency))
                for (_, name), nano in zip(columns, costs, strict=True)
            )
            yield PriceRow(label, condition_text(place), tuple(cells))


Costs = tuple[int | None, ...]


def range_of(price: NewPrice) -> PriceRanges:
    """Return the prompt lengths and the times to which a price applies."""
    return price.ranges


def _ranges(found: list[NewPrice], components: list[Component]) -> Iterable[tuple[PriceRanges, Costs]]:
    """Yield ranges within which no price changes, with each component's price; none without prices."""
    for schedule in sorted({range_of(price)[4:] for price in found}):
        yield from _ranges_on([price for price in found if range_of(price)[4:] == schedule], components, schedule)


def _ranges_on(
    found: list[NewPrice], components: list[Component], schedule: tuple[int, int, str]
) -> Iterable[tuple[PriceRanges, Costs]]:
    """Yield the ranges of prices that have the same weekdays and time zone."""
    ranges = [range_of(price) for price in found]
    lengths = sorted({length for place in ranges for length in place[:2]})
    minutes = sorted({minute for place in ranges for minute in place[2:4]})
    for since, until in pairwise(lengths):
        parts: list[tuple[PriceRanges, Costs]] = []
        for opens, closes in pairwise(minutes):
            place = PriceRanges(since, until, opens, closes, *schedule)
            costs = tuple(_cost(found, component, place) for component in components)
            if parts and parts[-1][1] == costs:  # only another range has a bound here
                place = place._replace(from_minute=parts.pop()[0].from_minute)
            parts.append((place, costs))
        yield from (part for part in parts if any(cost is not None for cost in part[1]))


def _cost(found: list[NewPrice], component: Component, place: PriceRanges) -> int | None:
    """Return the price of a component in a range. Prices of a component never overlap."""
    for price in found:
        since, until, opens, closes = range_of(price)[:4]
        within = since <= place[0] and place[1] <= until and opens <= place[2] and place[3] <= closes
        if price.component == component and within:
            return price.nano_per_million
    return None


def condition_text(place: PriceRanges) -> str:
    """Return a range as text; empty if the price always applies."""
    since, until, opens, closes, first, last, zone = place
    message = []
    if until != NO_END:
        message.append(
            _("prompts up to %(until)s tokens") % {"until": exact(until - 1)}
            if not since
            else _("prompts of %(since)s to %(until)s tokens") % {"since": exact(since), "until": exact(until - 1)}
        )
    elif since:
        message.append(_("prompts of %(since)s tokens or more") % {"since": exact(since)})
    is_daily = (first, last) == (0, DAYS_A_WEEK)
    if not is_daily:
        days = {"first": WEEKDAYS_ABBR[first], "last": WEEKDAYS_ABBR[last - 1]}
        message.append(_("%(first)s to %(last)s") % days if last - first > 1 else str(days["first"]))
    if (opens, closes) != (0, MINUTES_A_DAY) or not is_daily:
        message.append(
            _("%(opens)s to %(closes)s %(zone)s") % {"opens": _time(opens), "closes": _time(closes), "zone": zone}
        )
    return ", ".join(message)


def _time(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"
