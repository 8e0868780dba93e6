"""Pricing of tokens: compiled rate cards, maximum costs of requests, and costs of executions. Does not import Django.

A price is a whole number of nano-USD per million tokens, so tokens times price is a whole number of femto-USD. Only
maximum costs are rounded, up to whole nano-USD, and no amount is a float.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple
from zoneinfo import ZoneInfo

import msgspec
from msgspec.structs import astuple

from billing.currencies.amounts import whole_units
from inference_worker.contract.request import TOKEN_COLUMNS, TokenCounts
from inference_worker.contract.texts import Text

MINUTES_A_DAY = 1440
DAYS_A_WEEK = 7
UTC_ZONE = "UTC"
NO_END = 2**31 - 1  # end of an open range of prompt lengths: above any prompt


class Component(StrEnum):
    """A priced part of a request, or metered usage that is not part of one.

    The parts of a request have the names of `TokenCounts`. Forms, price files, invoices and quotes are in this order.

    Attributes:
        label: in the console, which translates it.
        unit: of the amount on invoices.
        plain: the component whose price counts without a cache.
        is_optional: whether it is free without a price. A request with another component without a price is rejected.
    """

    UNCACHED = "uncached", Text("Input"), Text("Input tokens")
    CACHE_READ = "cache_read", Text("Cache read"), Text("Input tokens, cached")
    CACHE_WRITE_5M = "cache_write_5m", Text("Cache write, 5 min"), Text("Input tokens, cache write (5 minutes)")
    CACHE_WRITE_1H = "cache_write_1h", Text("Cache write, 1 h"), Text("Input tokens, cache write (1 hour)")
    OUTPUT = "output", Text("Output"), Text("Output tokens"), "tokens", "output"
    # Tokens that a cached answer made unnecessary: of the prompt, and of the answer.
    ANSWER_HIT_INPUT = "answer_hit_input", Text("Cached response, input"), Text("Input tokens of cached responses")
    ANSWER_HIT_OUTPUT = (
        *("answer_hit_output", Text("Cached response, output"), Text("Output tokens of cached responses")),
        *("tokens", "output"),
    )
    CACHE_STORAGE = (
        "cache_storage",
        Text("Cache storage, token-hours"),
        Text("Cache storage"),
        "token-hours",
        "cache_storage",
    )
    # Of a dedicated deployment.
    MACHINE_HOURS = "machine_hours", Text("Machine-hours"), Text("Machine time"), "machine-hours", "machine_hours"
    SEARCHES = "searches", Text("Searches"), Text("Searches"), "searches", "searches", True  # billed for cross-encoders

    label: str
    invoice_label: str
    unit: str
    plain: str
    is_optional: bool

    def __new__(
        cls,
        name: str,
        label: str = "",  # a call by name only returns the member
        invoice_label: str = "",
        unit: str = "tokens",
        plain: str = "uncached",
        is_optional: bool = False,
    ) -> Component:
        component = str.__new__(cls, name)
        component._value_ = name
        component.label, component.invoice_label, component.unit = label, invoice_label, unit
        component.plain, component.is_optional = plain, is_optional
        return component


PRICED = tuple(Component)
COMPONENTS = tuple(map(Component, TOKEN_COLUMNS))  # in the order of `UsageEvent.price_ids`
METERED = tuple(component for component in Component if component not in COMPONENTS)
PLAIN = {component: Component(component.plain) for component in Component}
OUTPUTS = tuple(component for component in COMPONENTS if PLAIN[component] == Component.OUTPUT)
_FIRST_WEEKDAY = 3  # 1970 started on a Thursday


class Tier(StrEnum):
    """The service level of a request, with its own prices."""

    STANDARD = "standard"
    BATCH = "batch"
    FLEX = "flex"
    PRIORITY = "priority"


class Rate(msgspec.Struct, frozen=True, array_like=True):
    """A price of a component for half-open ranges of prompt lengths, times of day and weekdays."""

    price_id: int
    component: Component
    nano_per_million: int
    from_tokens: int = 0  # the prompt's length, of all its classes
    until_tokens: int = NO_END
    from_minute: int = 0  # minute of the day of the admission, by the clocks of the time zone
    until_minute: int = MINUTES_A_DAY
    from_weekday: int = 0  # Monday
    until_weekday: int = DAYS_A_WEEK
    time_zone: str = UTC_ZONE

    def applies(self, prompt_tokens: int, weekday: int, minute: int) -> bool:
        """Return whether the price applies to a prompt of that length at that time of its time zone."""
        return (
            self.from_tokens <= prompt_tokens < self.until_tokens
            and self.from_minute <= minute < self.until_minute
            and self.from_weekday <= weekday < self.until_weekday
        )


class RateCard(msgspec.Struct, frozen=True, dict=True):
    """All prices of a model and tier, for one tenant or for all. An admission pins one, and settlement uses it."""

    version: int  # the rate card's id, stored in each usage event priced by it
    tenant_id: int | None  # None: tenants without their own rate card
    model: str
    tier: Tier
    effective_from: int  # microseconds since 1970, UTC; until the next rate card of the same
    rates: tuple[Rate, ...]  # the first that applies to a component counts: a tenant's own, then the list's

    @cached_property
    def edges(self) -> tuple[list[int], list[int]]:
        """Return the prompt lengths and the minutes of the day at which rates change."""
        lengths = {edge for rate in self.rates for edge in (rate.from_tokens, rate.until_tokens)}
        minutes = {edge for rate in self.rates for edge in (rate.from_minute, rate.until_minute)}
        return sorted(lengths), sorted(minutes)

    @cached_property
    def schedules(self) -> list[str]:
        """Return the time zones of the rates, if a weekday or another zone than UTC matters."""
        zones = {rate.time_zone for rate in self.rates}
        days = {(rate.from_weekday, rate.until_weekday) for rate in self.rates}
        return sorted(zones) if zones - {UTC_ZONE} or days - {(0, DAYS_A_WEEK)} else []

    def place(self, prompt_tokens: int, at: int) -> tuple[int, ...]:
        """Return the key of the rates that apply to a prompt of that length at that microsecond."""
        lengths, minutes = self.edges
        length = bisect_right(lengths, prompt_tokens)
        if not self.schedules:
            return length, bisect_right(minutes, at // 60_000_000 % MINUTES_A_DAY)
        times = [clock(zone, at) for zone in self.schedules]
        return length, *(part for weekday, minute in times for part in (weekday, bisect_right(minutes, minute)))

    @cached_property
    def applying(self) -> dict[tuple[int, ...], list[tuple[int, int, int] | None]]:
        """Return the cache of `_applying`, by `place`."""
        return {}


class Rated(NamedTuple):
    """The cost of an execution."""

    price_ids: list[int | None] | None  # the price of each component, in the order of COMPONENTS; None: not billed
    cost_femto: int
    saved_femto: int  # compared with uncached tokens; negative if cache writes cost more


class UnknownPriceError(Exception):
    """A component without a price may apply. The request is rejected, never free."""


encode_rates = msgspec.msgpack.Encoder().encode
decode_rates = msgspec.msgpack.Decoder(tuple[Rate, ...]).decode


def clock(time_zone: str, at: int) -> tuple[int, int]:
    """Return the weekday, from 0 for Monday, and the minute of the day at that microsecond, by a zone's clocks."""
    if time_zone == UTC_ZONE:
        day, minute = divmod(at // 60_000_000, MINUTES_A_DAY)
        return (day + _FIRST_WEEKDAY) % DAYS_A_WEEK, minute
    local = datetime.fromtimestamp(at // 1_000_000, ZoneInfo(time_zone))
    return local.weekday(), local.hour * 60 + local.minute


def prices(rate_card: RateCard, prompt_tokens: int, at: int) -> dict[Component, Rate]:
    """Return the rate of each component for a prompt of that length, admitted at that microsecond."""
    times = {zone: clock(zone, at) for zone in {rate.time_zone for rate in rate_card.rates}}
    found: dict[Component, Rate] = {}
    for rate in rate_card.rates:
        if rate.component not in found and rate.applies(prompt_tokens, *times[rate.time_zone]):
            found[rate.component] = rate
    return found


def price(rate_card: RateCard, counts: TokenCounts, at: int) -> Rated:
    """Return the cost of an execution's tokens and searches, admitted at that microsecond.

    Optional components without a price cost nothing: a cross-encoder may be priced by tokens only.

    Raises:
        UnknownPriceError: a component used has no price.
    """
    tokens = astuple(counts)
    prompt = counts.prompt + counts.answer_hit_input
    place = rate_card.place(prompt, at)
    rates = rate_card.applying.get(place) or rate_card.applying.setdefault(place, _applying(rate_card, prompt, at))
    price_ids: list[int | None] = [None] * len(rates)
    cost = saved = 0
    for number, count in enumerate(tokens):
        if count:
            applies = rates[number]
            if applies is None:
                component = COMPONENTS[number]
                if component.is_optional:
                    continue
                raise UnknownPriceError(
                    Text(
                        "%(model)s (%(tier)s) has no price for %(component)s",
                        model=rate_card.model,
                        tier=rate_card.tier,
                        component=component,
                    )
                )
            price_ids[number], nano_per_million, plain = applies
            cost += count * nano_per_million
            saved += count * (plain - nano_per_million)
    return Rated(price_ids, cost, saved)


def reservation_nano(
    rate_card: RateCard,
    prompt_tokens: int,
    max_output: int,
    at: int,
    *,
    n: int = 1,
    writes_5m: bool = False,
    writes_1h: bool = False,
    searches: int = 0,
) -> int:
    """Return the maximum cost of a request in nano-USD, rounded up.

    The prompt counts in the most expensive class that it may have.

    Args:
        n: outputs of the request; 0 for an encoder, which has no cache.
        writes_5m, writes_1h: whether the prompt may be written to the cache.

    Raises:
        UnknownPriceError: a component it may use has no price.
    """
    classes = ["uncached", *["cache_read"] * (n > 0), *["cache_write_5m"] * writes_5m, *["cache_write_1h"] * writes_1h]
    possible = [TokenCounts(**{name: prompt_tokens}, output=max_output * n, searches=searches) for name in classes]
    return whole_units(max(price(rate_card, counts, at).cost_femto for counts in possible))


def _applying(rate_card: RateCard, prompt: int, at: int) -> list[tuple[int, int, int] | None]:
    """Return for each component the price's id, the price, and the price without a cache."""
    rates = prices(rate_card, prompt, at)
    return [
        (rate.price_id, rate.nano_per_million, rates.get(PLAIN[component], rate).nano_per_million)
        if (rate := rates.get(component))
        else None
        for component in COMPONENTS
    ]


class PriceIndex:
    """The rate cards of a gateway, by tenant, model, tier and time."""

    def __init__(self) -> None:
        self.newest = 0  # the highest version added; versions are added in order and never change
        self._rate_cards: dict[tuple[int | None, str, Tier], list[RateCard]] = {}

    def add(self, rate_cards: Iterable[RateCard]) -> None:
        """Add rate cards, in the order of their versions."""
        for rate_card in rate_cards:
            of_kind = self._rate_cards.setdefault((rate_card.tenant_id, rate_card.model, rate_card.tier), [])
            of_kind.insert(bisect_right(of_kind, rate_card.effective_from, key=_effective_from), rate_card)
            self.newest = max(self.newest, rate_card.version)

    def replace(self, other: PriceIndex) -> None:
        """Take the rate cards of another index instead of the own ones."""
        self.newest, self._rate_cards = other.newest, other._rate_cards

    def find(self, tenant_id: int, model: str, tier: Tier, at: int) -> RateCard | None:
        """Return the rate card active at that microsecond: of the tier, or else of the standard tier.

        A tenant's own rate card precedes the shared one. None: there is no price.
        """
        rate_card = self._of_tier(tenant_id, model, tier, at)
        if rate_card is None and tier != Tier.STANDARD:
            rate_card = self._of_tier(tenant_id, model, Tier.STANDARD, at)
        return rate_card

    def _of_tier(self, tenant_id: int, model: str, tier: Tier, at: int) -> RateCard | None:
        for owner in (tenant_id, None):
            of_kind = self._rate_cards.get((owner, model, tier), [])
            place = bisect_right(of_kind, at, key=_effective_from)
            if place:
                rate_card = of_kind[place - 1]
                return rate_card if rate_card.rates else None
        return None


def _effective_from(rate_card: RateCard) -> int:
    return rate_card.effective_from
