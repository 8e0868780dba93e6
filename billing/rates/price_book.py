"""Prices of a price version: parsing and validation. Does not import Django."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal, DecimalException, localcontext
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from billing.currencies.amounts import MAX_NANO_PER_MILLION, NANO_DIGITS
from billing.rates.pricing import DAYS_A_WEEK, MINUTES_A_DAY, NO_END, UTC_ZONE, Component, Tier
from inference_worker.contract.texts import Text

MAX_NAME_LENGTH = 128
MAX_ZONE_LENGTH = 64
WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MAX_PRICES = 50_000  # in one proposal

ModelTier = tuple[str, Tier]  # a model in a service tier


class PriceRanges(NamedTuple):
    """When a price applies: half-open ranges of prompt lengths, minutes of the day and weekdays, and the time zone."""

    from_tokens: int = 0
    until_tokens: int = NO_END
    from_minute: int = 0
    until_minute: int = MINUTES_A_DAY
    from_weekday: int = 0
    until_weekday: int = DAYS_A_WEEK
    time_zone: str = UTC_ZONE


class NewPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A proposed price. Ranges are half-open; minutes are of the day and weekdays of the week in the time zone."""

    model: str
    tier: Tier
    component: Component
    nano_per_million: int
    from_tokens: int = 0
    until_tokens: int = NO_END
    from_minute: int = 0
    until_minute: int = MINUTES_A_DAY
    from_weekday: int = 0
    until_weekday: int = DAYS_A_WEEK
    time_zone: str = UTC_ZONE

    @property
    def ranges(self) -> PriceRanges:
        return ranges_of(self)

    @property
    def model_tier(self) -> ModelTier:
        return self.model, self.tier


def ranges_of(price: Any) -> PriceRanges:
    """Return the prompt lengths, minutes, weekdays and time zone of a price or rate, in the order of their fields."""
    return PriceRanges(*(getattr(price, name) for name in PriceRanges._fields))


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
        raise ValueError(Text("%(usd_per_million)s is not a number", usd_per_million=repr(usd_per_million))) from None
    if exact != whole:
        raise ValueError(Text("%(usd_per_million)s is not a whole number of nano-USD", usd_per_million=usd_per_million))
    if not 0 <= whole <= MAX_NANO_PER_MILLION:
        raise ValueError(Text("%(usd_per_million)s is out of range", usd_per_million=usd_per_million))
    return whole


def parse(body: Mapping[str, Any]) -> Proposal:
    """Parse the proposal in a version's body.

    Raises: ValueError with the reason if it is invalid.
    """
    proposal = msgspec.convert(body, Proposal)
    check(proposal)
    return proposal


def check(proposal: Proposal) -> None:
    """Check prices that were parsed.

    Raises: ValueError with the reason if they are invalid.
    """
    if not proposal.model_tiers:
        raise ValueError(Text("the version sets no prices"))
    if len(proposal.prices) > MAX_PRICES:
        raise ValueError(Text("use at most %(max_prices)s prices", max_prices=MAX_PRICES))
    both = {price.model_tier for price in proposal.prices} & set(proposal.withdrawn)
    if both:
        raise ValueError(Text("%(both)s is both priced and withdrawn", both=min(both)[0]))
    for price in proposal.prices:
        _check_price(price)
    _check_overlap(proposal.prices)


def unpriced_hours(prices: Iterable[NewPrice]) -> list[str]:
    """Return the hours of the day in which a component with prices in other hours has none, as texts."""
    rows: dict[tuple[ModelTier, Component], list[NewPrice]] = defaultdict(list)
    for price in prices:
        rows[price.model_tier, price.component].append(price)
    return [text for key, found in sorted(rows.items()) for text in _gaps(*key, found)]


def _gaps(model_tier: ModelTier, component: Component, rows: Sequence[NewPrice]) -> Iterator[str]:
    for band in sorted({price.from_tokens for price in rows}):
        of_band = [price for price in rows if price.from_tokens <= band < price.until_tokens]
        by_day = [_find_uncovered(of_band, weekday) for weekday in range(DAYS_A_WEEK)]
        is_daily = all(hours == by_day[0] for hours in by_day)
        for weekday, gaps in enumerate(by_day[:1] if is_daily else by_day):
            for start, end in gaps:
                hours = " to ".join(f"{minute // 60:02}:{minute % 60:02}" for minute in (start, end))
                prompts = f" of prompts from {band} tokens" if band else ""
                day = "" if is_daily else f" on {WEEKDAYS[weekday]}"
                yield f"{model_tier[0]} ({model_tier[1]}): {component}{prompts} from {hours} {rows[0].time_zone}{day}"


def _find_uncovered(rows: Sequence[NewPrice], weekday: int) -> list[tuple[int, int]]:
    """Return the ranges of minutes of a weekday without a price."""
    windows = [(row.from_minute, row.until_minute) for row in rows if row.from_weekday <= weekday < row.until_weekday]
    found, covered = [], 0
    for start, end in [*sorted(windows), (MINUTES_A_DAY, MINUTES_A_DAY)]:
        if covered < start:
            found.append((covered, start))
        covered = max(covered, end)
    return found


def _check_price(price: NewPrice) -> None:
    if not 0 < len(price.model) <= MAX_NAME_LENGTH:
        raise ValueError(
            Text(
                "expected a model name of 1 to %(max_length)s characters, not %(model)s",
                max_length=MAX_NAME_LENGTH,
                model=repr(price.model),
            )
        )
    if not 0 <= price.nano_per_million <= MAX_NANO_PER_MILLION:
        raise ValueError(Text("%(model)s: %(component)s is out of range", model=price.model, component=price.component))
    if not 0 <= price.from_tokens < price.until_tokens <= NO_END:
        raise ValueError(Text("%(model)s: a range of prompt lengths must start before it ends", model=price.model))
    if not 0 <= price.from_minute < price.until_minute <= MINUTES_A_DAY:
        raise ValueError(
            Text(
                "%(model)s: a time range must start before it ends on the same day; split it at midnight",
                model=price.model,
            )
        )
    if not 0 <= price.from_weekday < price.until_weekday <= DAYS_A_WEEK:
        raise ValueError(
            Text("%(model)s: weekdays must be a range from mon to sun; split it after sun", model=price.model)
        )
    try:
        ZoneInfo(price.time_zone[:MAX_ZONE_LENGTH])
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(
            Text(
                "%(model)s: %(time_zone)s is no time zone, such as Europe/Berlin",
                model=price.model,
                time_zone=repr(price.time_zone),
            )
        ) from None


def _check_overlap(prices: Sequence[NewPrice]) -> None:
    same: dict[tuple[ModelTier, Component], list[NewPrice]] = defaultdict(list)
    for price in prices:
        same[price.model_tier, price.component].append(price)
    for (model_tier, component), rows in same.items():
        if len({price.time_zone for price in rows}) > 1:
            raise ValueError(
                Text(
                    "%(model)s (%(tier)s): prices of %(component)s have several time zones",
                    model=model_tier[0],
                    tier=model_tier[1],
                    component=component,
                )
            )
        rows.sort(key=lambda price: price.from_tokens)
        for place, one in enumerate(rows):
            for other in rows[place + 1 :]:
                if other.from_tokens >= one.until_tokens:
                    break
                minutes = one.from_minute < other.until_minute and other.from_minute < one.until_minute
                if minutes and one.from_weekday < other.until_weekday and other.from_weekday < one.until_weekday:
                    raise ValueError(
                        Text(
                            "%(model)s (%(tier)s): two prices of %(component)s overlap",
                            model=model_tier[0],
                            tier=model_tier[1],
                            component=component,
                        )
                    )
