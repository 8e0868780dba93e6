"""Import of price files: the public `model_prices_and_context_window.json`, and CSV. Decimals are exact."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal, localcontext
from itertools import pairwise
from typing import Any, NamedTuple

from msgspec.structs import replace

from billing.currencies.amounts import NANO_DIGITS, PPM, decimal
from billing.rates.price_book import MAX_NAME_LENGTH, WEEKDAYS, NewPrice, Proposal, nano_per_million
from billing.rates.pricing import DAYS_A_WEEK, MINUTES_A_DAY, NO_END, UTC_ZONE, Component, Rate, Tier
from inference_worker.contract.texts import Text, text_of
from tenants import csv_tables

_COMPONENT = {
    "input_cost_per_token": Component.UNCACHED,
    "output_cost_per_token": Component.OUTPUT,
    "cache_read_input_token_cost": Component.CACHE_READ,
    "input_cost_per_token_cache_hit": Component.CACHE_READ,  # an older name of the same
    "cache_creation_input_token_cost": Component.CACHE_WRITE_5M,
    "cache_creation_input_token_cost_above_1hr": Component.CACHE_WRITE_1H,
    "input_cost_per_query": Component.SEARCHES,
}
_TIER = {None: Tier.STANDARD, "batches": Tier.BATCH, "flex": Tier.FLEX, "priority": Tier.PRIORITY}
_NAME = re.compile(
    f"({'|'.join(sorted(_COMPONENT, key=len, reverse=True))})"
    r"(?:_above_(?P<thousands>\d{1,6})k_tokens)?(?:_(?P<tier>batches|flex|priority))?"
)
_WRITES = {Component.CACHE_WRITE_5M, Component.CACHE_WRITE_1H}
_PERCENT = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,4})?)\s*% of ([a-z0-9_]+)")
CSV_COLUMNS = (
    *("model", "tier", "component", "usd_per_million"),
    *("from_tokens", "until_tokens", "from_time", "until_time", "weekdays", "time_zone"),
)

Found = dict[tuple[Component, int], int | None]  # (component, band's start) -> nano per million; None: left out


@dataclass
class Imported:
    """The prices of a file, and what was left out with the reason."""

    prices: list[NewPrice] = field(default_factory=list)
    not_whole: list[str] = field(default_factory=list)  # prices that are not whole nano-USD per million
    rounded: bool = False  # imported, rounded half up; or left out
    refused: list[str] = field(default_factory=list)  # invalid prices: negative, or not a number
    unpriced: list[str] = field(default_factory=list)  # models without a price per token
    free: list[str] = field(default_factory=list)  # models with only prices of 0
    assumed: list[str] = field(default_factory=list)  # imported prices that the file does not have, with their source
    other_fields: Counter[str] = field(
        default_factory=Counter
    )  # prices of units that are not metered: images, seconds, …

    @property
    def proposal(self) -> Proposal:
        return Proposal(tuple(self.prices))


def read_public(text: str | bytes, *, rounding: bool = False, models: Iterable[str] | None = None) -> Imported:
    """Read the public price file: USD per token or search, by model.

    Classes of cached tokens without a price get another one (`_assume`), and `assumed` lists it. If a model has a price
    for cache writes of 5 minutes but not of an hour, the latter has no price, and such requests are rejected.

    Raises: ValueError if it is not such a file.
    """
    content = json.loads(text, parse_float=Decimal, parse_int=Decimal)
    if not isinstance(content, dict):
        raise ValueError(Text("expected a JSON object of models"))
    wanted = None if models is None else set(models)
    imported = Imported(rounded=rounding)
    for model, fields in content.items():
        if model == "sample_spec" or not isinstance(fields, dict) or (wanted is not None and model not in wanted):
            continue
        _read_model(model, fields, imported)
    return imported


def _read_model(model: str, fields: Mapping[str, Any], imported: Imported) -> None:
    by_tier: dict[Tier, Found] = defaultdict(dict)
    for name, value in _flat(fields):
        match = _NAME.fullmatch(name)
        if match is None:
            if "cost" in name and value:
                imported.other_fields[name] += 1
            continue
        since = int(match["thousands"]) * 1000 + 1 if match["thousands"] else 0
        key = _COMPONENT[match[1]], since
        found = by_tier[_TIER[match["tier"]]]
        if key not in found:
            found[key] = _nano(f"{model}: {name}", value, imported)
    if len(model) > MAX_NAME_LENGTH or not any((Component.UNCACHED, 0) in found for found in by_tier.values()):
        imported.unpriced.append(model)
        return
    standard = by_tier.get(Tier.STANDARD, {})
    rows = [
        row for tier, found in sorted(by_tier.items()) for row in _rows(model, tier, found, standard, imported.assumed)
    ]
    imported.prices += rows
    if rows and not any(row.nano_per_million for row in rows):
        imported.free.append(model)


def _flat(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields, with those of `tiered_pricing` renamed like prices by prompt length of other models."""
    for tier in fields.get("tiered_pricing") or ():
        start = int(tier.get("range", [0])[0])
        if start % 1000 == 0:
            for name in _COMPONENT.keys() & tier.keys():
                yield (f"{name}_above_{start // 1000}k_tokens" if start else name), tier[name]
    yield from fields.items()


def _nano(place: str, value: Any, imported: Imported) -> int | None:
    """Convert USD per token to nano-USD per million. None: noted as left out."""
    if not isinstance(value, Decimal) or not value.is_finite() or not 0 <= value < 1:
        imported.refused.append(f"{place} = {value}")
        return None
    with localcontext(prec=60):
        per_million = value.scaleb(6)
        try:
            return nano_per_million(per_million)
        except ValueError:
            imported.not_whole.append(f"{place} = {value}")
            if not imported.rounded:
                return None
            return nano_per_million(per_million.quantize(Decimal(1).scaleb(-NANO_DIGITS), ROUND_HALF_UP))


def _rows(model: str, tier: Tier, found: Found, standard: Found, assumed: list[str]) -> Iterator[NewPrice]:
    """Return the prices of a tier, each up to the start of the component's next range. Note the assumed ones."""
    if (Component.UNCACHED, 0) not in found:
        return
    prices = dict(found)
    for assumption in _assume(found, standard if tier != Tier.STANDARD else {}):
        if _price_at(prices, assumption.component, assumption.since) != [assumption.nano]:
            prices[assumption.component, assumption.since] = assumption.nano
        assumed.append(f"{model}, {tier.value}, {assumption}")
    for component in Component:
        starts = sorted(since for of, since in prices if of == component)
        for since, until in pairwise([*starts, NO_END]):
            nano = prices[component, since]
            if nano is not None:
                yield NewPrice(model, tier, component, nano, since, until)


class _Assumption(NamedTuple):
    """A price that the file does not have, for prompts from a length on, and the price that it is taken from."""

    component: Component
    since: int
    nano: int
    source: str

    def __str__(self) -> str:
        band = f" from {self.since} tokens" if self.since else ""
        return f"{self.component.value}{band} = {decimal(self.nano, NANO_DIGITS, 2)} (as {self.source})"


def _assume(found: Found, standard: Found) -> Iterator[_Assumption]:
    """Yield the prices that a tier lacks, by the ranges of prompt lengths of its uncached tokens.

    A class of cached tokens costs the least of the tier's uncached price, the class's price for shorter prompts, and
    its price in the standard tier. Other components keep their price for shorter prompts. A price that was left out is
    not replaced by another.
    """
    bands = sorted(since for of, since in found if of == Component.UNCACHED)
    priced, known = {of for of, _ in found}, {of for of, _ in standard}
    cached = {Component.CACHE_READ} | (_WRITES & priced or _WRITES & known or _WRITES)
    for component in Component:
        if component == Component.UNCACHED or component not in priced | cached:
            continue
        own = {since for of, since in found if of == component}
        others = {since for of, since in standard if of == component} if component in cached else set()
        last: int | None = None
        for since in sorted({*bands, *own, *others}):
            band = max(start for start in bands if start <= since)
            if any(band <= start <= since for start in own):
                last = None
                continue
            assumption = _assume_one(component, since, found, standard, is_cached=component in cached)
            if assumption is not None and assumption.nano != last:
                yield assumption
            last = None if assumption is None else assumption.nano


def _assume_one(
    component: Component, since: int, found: Found, standard: Found, *, is_cached: bool
) -> _Assumption | None:
    """Return the assumed price of a component for prompts from a length on. None: there is none to take it from."""
    sources = [(_price_at(found, component, since), f"{component.value} of shorter prompts")]
    if is_cached:
        sources.append((_price_at(standard, component, since), f"{component.value} of the standard tier"))
        sources.append((_price_at(found, Component.UNCACHED, since), Component.UNCACHED.value))
    known = [(prices[0], source) for prices, source in sources if prices]
    if not known or any(nano is None for nano, _ in known):
        return None
    nano, source = min((nano, source) for nano, source in known if nano is not None)
    return _Assumption(component, since, nano, source)


def _price_at(found: Found, component: Component, since: int) -> list[int | None]:
    """Return the price of a component for prompts of this length, None if it was left out; empty: it has none."""
    starts = [start for of, start in found if of == component and start <= since]
    return [found[component, max(starts)]] if starts else []


def read_csv(lines: Iterable[str]) -> Proposal:
    """Read a CSV with the columns of CSV_COLUMNS. Those after the fourth may be missing or empty.

    `usd_per_million` is a decimal, or a percentage of another component with the same other columns: `10% of uncached`.
    A band of prompt lengths and a window of the day (up to `24:00`) are half-open. A window that ends before it starts
    passes midnight and becomes two rows. `weekdays` are those on which the window starts, such as `mon-fri` or `sat`.
    Times are in `time_zone`, or else in UTC.

    Raises:
        ValueError: naming the line.
    """
    reader = csv_tables.read_table(lines, strict=True)
    prices: list[NewPrice] = []
    percentages: list[tuple[int, NewPrice, _Percentage]] = []
    try:
        columns = reader.fieldnames or []
        if missing := [name for name in CSV_COLUMNS[:4] if name not in columns]:
            raise ValueError(Text("the columns %(missing)s are missing", missing=", ".join(missing)))
        if unknown := [name for name in columns if name not in CSV_COLUMNS]:
            raise ValueError(
                Text(
                    "unknown columns %(unknown)s; known are %(columns)s",
                    unknown=", ".join(unknown),
                    columns=", ".join(CSV_COLUMNS),
                )
            )
        for row in reader:
            price, percentage = _csv_price(row)
            if percentage is None:
                prices += _within_days(price)
            else:
                percentages += [(reader.line_num, part, percentage) for part in _within_days(price)]
    except (ValueError, csv_tables.Error) as exc:
        raise ValueError(
            Text("line %(line_num)s: %(error)s", line_num=str(max(reader.line_num, 1)), error=text_of(exc))
        ) from exc
    known = {replace(price, nano_per_million=0): price.nano_per_million for price in prices}
    for number, price, (millionths, component) in percentages:
        base = known.get(replace(price, component=component))
        if base is None:
            raise ValueError(
                Text(
                    "line %(number)s: there is no price of %(component)s with the same other columns",
                    number=str(number),
                    component=component.value,
                )
            )
        nano, rest = divmod(base * millionths, PPM)
        if rest:
            raise ValueError(
                Text("line %(number)s: the percentage gives no whole nano-USD per million tokens", number=str(number))
            )
        prices.append(replace(price, nano_per_million=nano))
    return Proposal(tuple(prices))


class _Percentage(NamedTuple):
    """A price relative to that of another component."""

    millionths: int
    component: Component


def _percentage(text: str) -> _Percentage | None:
    match = _PERCENT.fullmatch(text)
    return None if match is None else _Percentage(int(Decimal(match[1]).scaleb(4)), Component(match[2]))


def _within_days(price: NewPrice) -> list[NewPrice]:
    """Return the price, in parts if its window passes midnight or its weekdays pass Sunday."""
    if price.from_minute < price.until_minute:
        return _within_weeks(price)
    parts = _within_weeks(replace(price, until_minute=MINUTES_A_DAY))
    if price.until_minute:
        first, last = price.from_weekday + 1, price.until_weekday + 1
        parts += _within_weeks(replace(price, from_minute=0, from_weekday=first, until_weekday=last))
    return parts


def _within_weeks(price: NewPrice) -> list[NewPrice]:
    first, last = price.from_weekday, price.until_weekday
    if last - first == DAYS_A_WEEK:
        return [replace(price, from_weekday=0, until_weekday=DAYS_A_WEEK)]
    if first >= DAYS_A_WEEK:
        return [replace(price, from_weekday=first - DAYS_A_WEEK, until_weekday=last - DAYS_A_WEEK)]
    if last <= DAYS_A_WEEK:
        return [price]
    return [replace(price, until_weekday=DAYS_A_WEEK), replace(price, from_weekday=0, until_weekday=last - DAYS_A_WEEK)]


def _csv_price(row: Mapping[str, str | None]) -> tuple[NewPrice, _Percentage | None]:
    """Return the price of a row; of a percentage, without its amount."""
    given = {name: csv_tables.unguard_cell((value or "").strip()) for name, value in row.items() if name}
    percentage = _percentage(given["usd_per_million"])
    price = NewPrice(
        given["model"],
        Tier(given["tier"] or Tier.STANDARD),
        Component(given["component"]),
        0 if percentage else nano_per_million(given["usd_per_million"]),
        int(given.get("from_tokens") or 0),
        int(given.get("until_tokens") or NO_END),
        minute(given.get("from_time") or "00:00"),
        minute(given.get("until_time") or "24:00"),
        *weekdays(given.get("weekdays") or ""),
        given.get("time_zone") or UTC_ZONE,
    )
    if price.from_minute == price.until_minute:
        raise ValueError(Text("from_time and until_time are equal: leave both empty for the whole day"))
    return price, percentage


def weekdays(text: str) -> tuple[int, int]:
    """Convert weekdays, such as `mon-fri` or `sat`, to a half-open range. One that passes Sunday ends after 7.

    Raises: ValueError if they are not weekdays.
    """
    if not text:
        return 0, DAYS_A_WEEK
    first, _, last = text.lower().partition("-")
    try:
        start, end = WEEKDAYS.index(first.strip()), WEEKDAYS.index((last or first).strip())
    except ValueError:
        raise ValueError(
            Text("%(text)s are no weekdays: use mon, tue, wed, thu, fri, sat or sun, or mon-fri", text=repr(text))
        ) from None
    return start, (end if start <= end else end + DAYS_A_WEEK) + 1


def weekdays_text(price: NewPrice | Rate) -> str:
    """Return the weekdays of a price in the format of a CSV; empty for all."""
    first, last = price.from_weekday, price.until_weekday - 1
    if (first, last) == (0, DAYS_A_WEEK - 1):
        return ""
    return WEEKDAYS[first] if first == last else f"{WEEKDAYS[first]}-{WEEKDAYS[last]}"


def minute(text: str) -> int:
    """Convert a time of day, `00:00` to `24:00`, to minutes.

    Raises: ValueError if it is not a time of day.
    """
    match = re.fullmatch(r"(\d\d):([0-5]\d)", text)
    if match is None or (at := int(match[1]) * 60 + int(match[2])) > MINUTES_A_DAY:
        raise ValueError(Text("%(text)s is not a time of day: use HH:MM", text=repr(text)))
    return at
