"""What tokens cost: compiled prices, the hold that bounds a request, and the lines it amounts to. Free of Django.

A price is a whole number of nano-USD per million tokens, so tokens times price is a whole number of femto-USD. Nothing
here divides but to round a hold up to whole nano-USD, and nothing here is a float.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

FEMTO_PER_NANO = 1_000_000
MINUTES_A_DAY = 1440
NO_END = 2**31 - 1  # of a band of prompt lengths: above any prompt
UNBOUNDED = 2**31 - 1  # output tokens that cost nothing: as many as one likes


class Component(StrEnum):
    """What a price is for."""

    UNCACHED = "uncached"
    CACHE_READ = "cache_read"
    CACHE_WRITE_5M = "cache_write_5m"
    CACHE_WRITE_1H = "cache_write_1h"
    OUTPUT = "output"
    ANSWER_HIT_INPUT = "answer_hit_input"  # tokens an answer from a cache made needless: of the prompt,
    ANSWER_HIT_OUTPUT = "answer_hit_output"  # and of the answer


COMPONENTS = tuple(Component)  # NOTE: in the order of `UsageEvent.price_ids`; append, never reorder
OUTPUTS = (Component.OUTPUT, Component.ANSWER_HIT_OUTPUT)
INPUTS = tuple(component for component in COMPONENTS if component not in OUTPUTS)
_OUTPUT_PLACES = tuple(COMPONENTS.index(each) for each in OUTPUTS)
_PLAIN = {each: Component.OUTPUT if each in OUTPUTS else Component.UNCACHED for each in COMPONENTS}  # without a cache


class Tier(StrEnum):
    """How soon a request is served, which has its price."""

    STANDARD = "standard"
    BATCH = "batch"
    FLEX = "flex"
    PRIORITY = "priority"


class Rate(msgspec.Struct, frozen=True, array_like=True):
    """One row of the price book: the price of a component for prompts and times of day in half-open ranges."""

    price_id: int
    component: Component
    nano_per_million: int
    from_tokens: int = 0  # the prompt's length, all its classes together
    until_tokens: int = NO_END
    from_minute: int = 0  # of the UTC day in which the request is admitted
    until_minute: int = MINUTES_A_DAY


class RateCard(msgspec.Struct, frozen=True):
    """All prices of a model in a service tier, for one tenant or for all: what an admission pins and settling reads."""

    version: int  # the sheet's id, which stands on each usage event priced by it
    tenant_id: int | None  # None: every tenant without a sheet of its own
    model: str
    tier: Tier
    effective_from: int  # microseconds since 1970, UTC; until the next sheet of the same
    rates: tuple[Rate, ...]  # of two that apply to a component the first counts: a tenant's own, then the list's


class Rated(NamedTuple):
    """What an execution cost."""

    price_ids: list[int | None] | None  # what priced each component, in the order of COMPONENTS; None: nobody pays
    cost_femto: int
    saved_femto: int  # against uncached tokens and a new answer; below zero if writing to the cache cost more


class UnknownPriceError(Exception):
    """A component that may apply has no price: the request is refused, never free."""


encode_rates = msgspec.msgpack.Encoder().encode
decode_rates = msgspec.msgpack.Decoder(tuple[Rate, ...]).decode


def prices(sheet: RateCard, prompt_tokens: int, at: int) -> dict[Component, Rate]:
    """Return the rate of each component for a prompt of that length, admitted at that microsecond."""
    minute = at // 60_000_000 % MINUTES_A_DAY
    found: dict[Component, Rate] = {}
    for rate in sheet.rates:
        if (
            rate.component not in found
            and rate.from_tokens <= prompt_tokens < rate.until_tokens
            and rate.from_minute <= minute < rate.until_minute
        ):
            found[rate.component] = rate
    return found


def hold_nano(
    sheet: RateCard,
    prompt_tokens: int,
    max_output: int,
    at: int,
    *,
    n: int = 1,
    writes_5m: bool = False,
    writes_1h: bool = False,
) -> int:
    """Return what the request may cost at most, in nano-USD, rounded up. `writes_…`: it may write to the prefix cache
    so.

    Raises:
        UnknownPriceError: a component it may use has no price.
    """
    found = prices(sheet, prompt_tokens, at)
    femto = prompt_tokens * _dearest_input(sheet, found, writes_5m, writes_1h)
    if max_output * n:
        femto += max_output * n * _price(sheet, found, Component.OUTPUT).nano_per_million
    return nano(femto)


def affordable_output(
    sheet: RateCard,
    prompt_tokens: int,
    money: int,
    at: int,
    *,
    n: int = 1,
    writes_5m: bool = False,
    writes_1h: bool = False,
) -> int:
    """Return the largest `max_output` whose hold is within `money` nano-USD; below 1 if not even the prompt and one
    token is.

    Raises:
        UnknownPriceError: a component it may use has no price.
    """
    found = prices(sheet, prompt_tokens, at)
    left = money * FEMTO_PER_NANO - prompt_tokens * _dearest_input(sheet, found, writes_5m, writes_1h)
    a_token = n * _price(sheet, found, Component.OUTPUT).nano_per_million
    if left < 0:
        return 0
    return left // a_token if a_token else UNBOUNDED


class Rater:
    """Rates executions by one sheet. What applies to a band of prompt lengths at a time of day is looked up once."""

    def __init__(self, sheet: RateCard) -> None:
        self.sheet = sheet
        self._lengths = sorted({edge for rate in sheet.rates for edge in (rate.from_tokens, rate.until_tokens)})
        self._minutes = sorted({edge for rate in sheet.rates for edge in (rate.from_minute, rate.until_minute)})
        self._found: dict[tuple[int, int], list[tuple[int, int, int] | None]] = {}

    def rate(self, counts: Sequence[int], at: int) -> Rated:
        """Return the cost of the tokens of each component (in the order of COMPONENTS), admitted at that microsecond.

        Raises:
            UnknownPriceError: a component used has no price.
        """
        prompt = sum(counts) - sum([counts[place] for place in _OUTPUT_PLACES])
        minute = at // 60_000_000 % MINUTES_A_DAY
        place = bisect_right(self._lengths, prompt), bisect_right(self._minutes, minute)
        found = self._found.get(place) or self._found.setdefault(place, self._applying(prompt, at))
        price_ids: list[int | None] = [None] * len(found)
        cost = saved = 0
        for number, count in enumerate(counts):
            if count:
                applies = found[number]
                if applies is None:
                    raise _unknown(self.sheet, COMPONENTS[number])
                price_ids[number], price, plain = applies
                cost += count * price
                saved += count * (plain - price)
        return Rated(price_ids, cost, saved)

    def _applying(self, prompt: int, at: int) -> list[tuple[int, int, int] | None]:
        """Of each component: the price's id, the price, and what the same would cost without a cache."""
        found = prices(self.sheet, prompt, at)
        return [
            (price.price_id, price.nano_per_million, found.get(_PLAIN[component], price).nano_per_million)
            if (price := found.get(component))
            else None
            for component in COMPONENTS
        ]


def rate(sheet: RateCard, usage: Mapping[Component, int], at: int) -> Rated:
    """Return what one execution's tokens cost.

    Raises:
        UnknownPriceError: a component used has no price.
    """
    return Rater(sheet).rate([usage.get(component, 0) for component in COMPONENTS], at)


def nano(femto: int) -> int:
    """Femto-USD as whole nano-USD, rounded up."""
    return -(-femto // FEMTO_PER_NANO)


def _dearest_input(sheet: RateCard, found: Mapping[Component, Rate], writes_5m: bool, writes_1h: bool) -> int:
    possible = [Component.UNCACHED, Component.CACHE_READ]
    if writes_5m:
        possible.append(Component.CACHE_WRITE_5M)
    if writes_1h:
        possible.append(Component.CACHE_WRITE_1H)
    return max(_price(sheet, found, component).nano_per_million for component in possible)


def _price(sheet: RateCard, found: Mapping[Component, Rate], component: Component) -> Rate:
    if component not in found:
        raise _unknown(sheet, component)
    return found[component]


def _unknown(sheet: RateCard, component: Component) -> UnknownPriceError:
    return UnknownPriceError(f"{sheet.model} ({sheet.tier}) has no price for {component}")


class PriceIndex:
    """Every sheet a gateway may need, found by tenant, model, tier and instant."""

    def __init__(self) -> None:
        self.newest = 0  # the greatest version added: sheets are added in this order and never change
        self._sheets: dict[tuple[int | None, str, Tier], list[RateCard]] = {}

    def add(self, sheets: Iterable[RateCard]) -> None:
        """Take in sheets, in the order of their versions."""
        for sheet in sheets:
            of_kind = self._sheets.setdefault((sheet.tenant_id, sheet.model, sheet.tier), [])
            of_kind.insert(bisect_right(of_kind, sheet.effective_from, key=_effective_from), sheet)
            self.newest = max(self.newest, sheet.version)

    def find(self, tenant_id: int, model: str, tier: Tier, at: int) -> RateCard | None:
        """Return the sheet active at that microsecond: of the tier, or, where that has none, of the standard tier.

        In each the tenant's own comes before everybody's. None: there is no price.
        """
        sheet = self._of_tier(tenant_id, model, tier, at)
        if sheet is None and tier != Tier.STANDARD:
            sheet = self._of_tier(tenant_id, model, Tier.STANDARD, at)
        return sheet

    def _of_tier(self, tenant_id: int, model: str, tier: Tier, at: int) -> RateCard | None:
        for owner in (tenant_id, None):
            of_kind = self._sheets.get((owner, model, tier), [])
            place = bisect_right(of_kind, at, key=_effective_from)
            if place:
                sheet = of_kind[place - 1]
                return sheet if sheet.rates else None
        return None


def _effective_from(sheet: RateCard) -> int:
    return sheet.effective_from
