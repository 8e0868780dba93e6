"""What the tenant pays: active and announced prices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from django.db.models import Q

from billing.models import CompiledRateCard
from billing.pricing.price_book import NewPrice, current_prices
from billing.pricing.pricing import MINUTES_A_DAY, NO_END, Component, Tier
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext

MOST_CHANGES = 12
COLUMNS = (
    (Component.UNCACHED, "Input"),
    (Component.CACHE_READ, "Cache read"),
    (Component.CACHE_WRITE_5M, "Cache write, 5 min"),
    (Component.CACHE_WRITE_1H, "Cache write, 1 h"),
    (Component.OUTPUT, "Output"),
    (Component.ANSWER_HIT_INPUT, "Cached response, input"),
    (Component.ANSWER_HIT_OUTPUT, "Cached response, output"),
)
TIERS = {Tier.STANDARD: "Standard", Tier.BATCH: "Batch", Tier.FLEX: "Flex", Tier.PRIORITY: "Priority"}


@dataclass(frozen=True)
class PriceCell:
    label: str  # the column's
    price: Money | None


@dataclass(frozen=True)
class PriceRow:
    """A tier's prices, for a band of prompts and a part of the day where they differ by these."""

    tier: str
    when: str  # "" always
    cells: tuple[PriceCell, ...]


@dataclass(frozen=True)
class PriceModel:
    name: str
    rows: tuple[PriceRow, ...]


@dataclass(frozen=True)
class PriceChange:
    """Prices that are announced."""

    at: datetime
    models: tuple[PriceModel, ...]


@dataclass(frozen=True)
class PriceListPanel:
    columns: tuple[str, ...]
    models: tuple[PriceModel, ...]
    changes: tuple[PriceChange, ...]


def prices(visit: PageContext) -> PriceListPanel:
    """All that is priced for the tenant."""
    tenant = visit.tenant.pk
    now = current_prices(tenant, visit.now)
    ahead = [(at, only, current_prices(tenant, at)) for at, only in _announced(tenant, visit.now)]
    there = {price.component for found in (now, *(found for _, _, found in ahead)) for price in found}
    columns = [column for column in COLUMNS if column[0] in there]
    changes = tuple(
        PriceChange(at, models_of([price for price in found if price.model in only], columns))
        for at, only, found in ahead
    )
    return PriceListPanel(tuple(label for _, label in columns), models_of(now, columns), changes)


def _announced(tenant: int, now: datetime) -> list[tuple[datetime, set[str]]]:
    """When prices change, and of which models."""
    rows = CompiledRateCard.objects.filter(Q(tenant_id=tenant) | Q(tenant_id=None), effective_from__gt=now)
    found: dict[datetime, set[str]] = defaultdict(set)
    for at, model in rows.order_by("effective_from").values_list("effective_from", "model"):
        found[at].add(model)
    return list(found.items())[:MOST_CHANGES]


def models_of(found: Iterable[NewPrice], columns: list[tuple[Component, str]]) -> tuple[PriceModel, ...]:
    """Return the prices as a table shows them."""
    by_model: dict[str, list[NewPrice]] = defaultdict(list)
    for price in found:
        by_model[price.model].append(price)
    return tuple(PriceModel(name, tuple(_rows(rows, columns))) for name, rows in by_model.items())


def _rows(found: list[NewPrice], columns: list[tuple[Component, str]]) -> Iterable[PriceRow]:
    """One row for each tier, or for each band of prompt lengths and part of the day in which its prices differ."""
    for tier, label in TIERS.items():
        mine = [price for price in found if price.tier == tier]
        for place, costs in _places(mine, [component for component, _ in columns]):
            cells = (
                PriceCell(name, None if nano is None else Money.nano(nano))
                for (_, name), nano in zip(columns, costs, strict=True)
            )
            yield PriceRow(label, said_of(place), tuple(cells))


Place = tuple[int, int, int, int]
Costs = tuple[int | None, ...]


def range_of(price: NewPrice) -> Place:
    """For which prompts, and which minutes of the UTC day."""
    return price.from_tokens, price.until_tokens, price.from_minute, price.until_minute


def _places(found: list[NewPrice], components: list[Component]) -> Iterable[tuple[Place, Costs]]:
    """Ranges in which no price begins or ends, and what each component costs there; none where nothing is priced."""
    ranges = [range_of(price) for price in found]
    lengths = sorted({length for place in ranges for length in place[:2]})
    minutes = sorted({minute for place in ranges for minute in place[2:]})
    for since, until in pairwise(lengths):
        parts: list[tuple[Place, Costs]] = []
        for opens, closes in pairwise(minutes):
            costs = tuple(_cost(found, component, (since, until, opens, closes)) for component in components)
            if parts and parts[-1][1] == costs:  # another band alone has a price that begins here
                opens = parts.pop()[0][2]
            parts.append(((since, until, opens, closes), costs))
        yield from (part for part in parts if any(cost is not None for cost in part[1]))


def _cost(found: list[NewPrice], component: Component, place: Place) -> int | None:
    """Of the component's prices, which never overlap, the one that holds there."""
    for price in found:
        since, until, opens, closes = range_of(price)
        within = since <= place[0] and place[1] <= until and opens <= place[2] and place[3] <= closes
        if price.component == component and within:
            return price.nano_per_million
    return None


def said_of(place: Place) -> str:
    """Return a range in words; empty: always."""
    since, until, opens, closes = place
    said = []
    if until != NO_END:
        said.append(
            f"prompts up to {until - 1:,} tokens" if not since else f"prompts of {since:,} to {until - 1:,} tokens"
        )
    elif since:
        said.append(f"prompts of {since:,} tokens or more")
    if (opens, closes) != (0, MINUTES_A_DAY):
        said.append(f"{_time(opens)} to {_time(closes)} UTC")
    return ", ".join(said)


def _time(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"
