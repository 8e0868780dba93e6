"""Prices, reservations and rated lines: the specification's worked examples, and properties for any price and usage."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.rates.pricing import (
    COMPONENTS,
    NO_END,
    Component,
    PriceIndex,
    Rate,
    RateCard,
    Tier,
    UnknownPriceError,
    clock,
    decode_rates,
    encode_rates,
    price,
    reservation_nano,
)
from billing.rates.pricing import prices as prices_of
from inference_worker.contract.request import TokenCounts

C = Component
INPUTS = [each for each in C if each not in (C.OUTPUT, C.ANSWER_HIT_OUTPUT)]
USD = 10**15  # femto


def rate_card(
    *rates: Rate, version: int = 1, tenant_id: int | None = None, tier: Tier = Tier.STANDARD, effective_from: int = 0
) -> RateCard:
    return RateCard(version, tenant_id, "m", tier, effective_from, rates)


def rates(**usd: str) -> list[Rate]:
    return [Rate(place, C(name), int(Decimal(each) * 10**9)) for place, (name, each) in enumerate(usd.items())]


A = rate_card(*rates(uncached="3", cache_write_5m="3.75", cache_write_1h="6", cache_read="0.30", output="15"))
HALF = rate_card(*rates(uncached="1.5", cache_write_5m="1.875", cache_write_1h="3", cache_read="0.15", output="7.5"))
B = rate_card(*rates(uncached="2.50", cache_read="1.25", output="10"))
BANDS = rate_card(
    Rate(1, C.UNCACHED, 1_250_000_000, 0, 200_001),
    Rate(2, C.UNCACHED, 2_500_000_000, 200_001),
    Rate(3, C.CACHE_READ, 125_000_000),
    Rate(4, C.OUTPUT, 10**10),
)


def cost(prices: RateCard, at: int = 0, **usage: int) -> Decimal:
    return Decimal(price(prices, TokenCounts(**usage), at).cost_femto) / USD


def priced_by(prices: RateCard, at: int) -> int | None:
    """Return the ID of the price of uncached tokens at this time."""
    price_ids = price(prices, TokenCounts(1), at).price_ids
    return price_ids[0] if price_ids else None


@pytest.mark.parametrize(
    ("prices", "usage", "usd"),
    [
        (A, {"uncached": 3, "cache_write_5m": 12_304, "output": 550}, "0.054399"),
        (
            A,
            {"uncached": 1000, "cache_write_5m": 2048, "cache_write_1h": 4096, "cache_read": 100_000, "output": 500},
            "0.072756",
        ),
        (B, {"uncached": 86, "cache_read": 1920, "output": 300}, "0.005615"),
        (BANDS, {"uncached": 200_000}, "0.25"),
        (BANDS, {"uncached": 200_001}, "0.5000025"),
        (HALF, {"uncached": 10_000, "output": 2_000}, "0.03"),
        (A, {"uncached": 1000, "cache_read": 9000, "output": 500}, "0.0132"),
    ],
)
def test_worked_examples_1_to_6(prices, usage, usd):
    assert cost(prices, **usage) == Decimal(usd)


def test_worked_example_6_reservations():
    assert reservation_nano(A, 10_000, 4096, 0) == 91_440_000
    assert reservation_nano(A, 10_000, 4096, 0, writes_5m=True) == 98_940_000
    assert reservation_nano(A, 10_000, 4096, 0, writes_5m=True, writes_1h=True) == 121_440_000


def test_cached_tokens_count_towards_the_band():
    assert cost(BANDS, uncached=1, cache_read=200_000) == Decimal("0.0000025") + Decimal("0.025")


def test_a_reservation_is_rounded_up():
    tiny = rate_card(Rate(1, C.UNCACHED, 1), Rate(2, C.CACHE_READ, 1), Rate(3, C.OUTPUT, 1))
    assert reservation_nano(tiny, 1, 0, 0) == 1
    assert reservation_nano(tiny, 999_999, 1, 0) == 1
    assert reservation_nano(tiny, 999_999, 2, 0) == 2


def test_the_minute_of_admission_selects_the_time_window():
    night = rate_card(
        Rate(1, C.UNCACHED, 10, from_minute=0, until_minute=480), Rate(2, C.UNCACHED, 20, from_minute=480)
    )
    minute = 60_000_000
    assert [priced_by(night, at) for at in (0, 480 * minute - 1, 480 * minute)] == [1, 1, 2]
    assert priced_by(night, (5 * 1440 + 10) * minute) == 1


BERLIN = "Europe/Berlin"


@pytest.mark.parametrize(
    ("at", "place"),
    [
        ("2026-03-27T07:59:59Z", 2),  # Friday, 08:59 in Berlin
        ("2026-03-27T08:00:00Z", 1),
        ("2026-03-28T08:00:00Z", 3),  # Saturday
        ("2026-03-29T21:59:59Z", 3),  # Sunday; the clocks were set forward at 01:00 UTC
        ("2026-03-29T22:00:00Z", 2),  # Monday
        ("2026-03-30T07:00:00Z", 1),
        ("2026-10-26T07:59:59Z", 2),  # Monday after the clocks were set back
        ("2026-10-26T08:00:00Z", 1),
    ],
)
def test_weekdays_and_times_of_a_price_are_those_of_its_time_zone(at, place):
    business = Rate(1, C.UNCACHED, 30, 0, NO_END, 540, 1020, 0, 5, BERLIN)
    evening = [Rate(2, C.UNCACHED, 20, 0, NO_END, *minutes, 0, 5, BERLIN) for minutes in ((0, 540), (1020, 1440))]
    weekend = Rate(3, C.UNCACHED, 10, 0, NO_END, 0, 1440, 5, 7, BERLIN)
    card = rate_card(business, *evening, weekend, Rate(4, C.OUTPUT, 1))
    moment = round(datetime.fromisoformat(at).timestamp() * 10**6)
    assert priced_by(card, moment) == place
    assert prices_of(card, 1, moment)[C.UNCACHED].price_id == place
    assert decode_rates(encode_rates(card.rates)) == card.rates


def test_rates_of_earlier_releases_apply_on_all_weekdays():
    """They were stored without the last three fields."""
    old = msgspec.msgpack.encode([[1, "uncached", 10, 0, NO_END, 0, 1440]])
    assert decode_rates(old) == (Rate(1, C.UNCACHED, 10),)


@given(st.integers(0, 4 * 10**15), st.integers(0, 6), st.integers(0, 1439))
def test_utc_clocks_equal_those_of_the_time_zone_database(at, weekday, minute):
    assert clock("UTC", at) == clock("Etc/UTC", at)
    edge = Rate(1, C.UNCACHED, 1, 0, NO_END, minute, 1440, weekday, 7)
    card = rate_card(edge, Rate(2, C.UNCACHED, 2))
    day, now = clock("UTC", at)
    assert priced_by(card, at) == (1 if day >= weekday and now >= minute else 2)


def test_the_first_rate_that_applies_is_used():
    own = rate_card(Rate(9, C.UNCACHED, 7, from_minute=0, until_minute=60), Rate(1, C.UNCACHED, 10))
    assert [priced_by(own, at) for at in (0, 61 * 60_000_000)] == [9, 1]


@pytest.mark.parametrize("missing", ["uncached", "cache_read", "output"])
def test_an_unknown_price_is_an_error_and_never_free(missing):
    usd = {"uncached": "1", "cache_read": "1", "output": "1"}
    del usd[missing]
    with pytest.raises(UnknownPriceError, match=missing):
        reservation_nano(rate_card(*rates(**usd)), 10, 10, 0)
    with pytest.raises(UnknownPriceError, match=missing):
        price(rate_card(*rates(**usd)), TokenCounts(**{missing: 1}), 0)


def test_an_encoder_requires_only_a_price_of_the_prompt():
    assert reservation_nano(rate_card(*rates(uncached="0.05")), 1000, 0, 0, n=0) == 50_000


def test_searches_are_charged_if_they_have_a_price():
    """$2 per 1,000 searches. Without a price, a cross-encoder is charged for its tokens only."""
    both = rate_card(*rates(uncached="0.05", searches="2000"))
    assert cost(both, uncached=1000, searches=3) == Decimal("0.00605")
    assert price(both, TokenCounts(uncached=1000, searches=3), 0).saved_femto == 0
    assert reservation_nano(both, 1000, 0, 0, n=0, searches=3) == 6_050_000
    tokens = rate_card(*rates(uncached="0.05"))
    assert reservation_nano(tokens, 1000, 0, 0, n=0, searches=3) == 50_000
    rated = price(tokens, TokenCounts(uncached=1000, searches=3), 0)
    assert (rated.cost_femto, rated.price_ids and rated.price_ids[COMPONENTS.index(C.SEARCHES)]) == (50 * 10**9, None)


def test_cache_writes_require_a_price_if_they_are_possible():
    assert reservation_nano(B, 10, 10, 0)
    with pytest.raises(UnknownPriceError, match="cache_write_1h"):
        reservation_nano(B, 10, 10, 0, writes_1h=True)


def test_without_output_no_output_price_is_required():
    embedding = rate_card(*rates(uncached="0.02", cache_read="0.02"))
    assert reservation_nano(embedding, 1_000_000, 0, 0) == 20_000_000


def test_savings_are_relative_to_uncached_tokens():
    usage = TokenCounts(uncached=1000, cache_read=10_000, cache_write_5m=1000, output=5)
    assert price(A, usage, 0).saved_femto == 10_000 * 2_700_000_000 - 1000 * 750_000_000
    answers = rate_card(*A.rates, *rates(answer_hit_input="0.3", answer_hit_output="1"))
    hit = TokenCounts(answer_hit_input=10, answer_hit_output=100)
    assert price(answers, hit, 0).saved_femto == 10 * 2_700_000_000 + 100 * 14_000_000_000


def test_rates_survive_their_encoding():
    assert decode_rates(encode_rates(BANDS.rates)) == BANDS.rates


def test_the_index_prefers_the_tenants_prices_to_list_prices():
    index = PriceIndex()
    mine = rate_card(*A.rates, version=3, tenant_id=7, effective_from=50)
    withdrawn = rate_card(version=4, effective_from=100)
    index.add([rate_card(*A.rates, version=1), rate_card(*B.rates, version=2, effective_from=10), mine, withdrawn])

    def version(tenant: int, at: int) -> int | None:
        found = index.find(tenant, "m", Tier.STANDARD, at)
        return found and found.version

    assert [version(1, at) for at in (-1, 0, 9, 10, 99, 100)] == [None, 1, 1, 2, 2, None]
    assert [version(7, at) for at in (49, 50, 100)] == [2, 3, 3]
    assert index.find(1, "other", Tier.STANDARD, 0) is None
    assert index.newest == 4


def test_a_tier_without_a_price_costs_the_standard_price():
    index = PriceIndex()
    index.add([rate_card(*A.rates, version=1), rate_card(*B.rates, version=2, tier=Tier.BATCH, effective_from=10)])
    index.add([rate_card(*A.rates, version=3, tenant_id=7, effective_from=20)])
    index.add([rate_card(version=4, tier=Tier.BATCH, effective_from=30), rate_card(version=5, effective_from=40)])

    def version(tenant: int, tier: Tier, at: int) -> int | None:
        found = index.find(tenant, "m", tier, at)
        return found and found.version

    assert [version(1, Tier.BATCH, at) for at in (-1, 0, 10, 30, 40)] == [None, 1, 2, 1, None]
    assert [version(1, tier, 10) for tier in (Tier.FLEX, Tier.PRIORITY)] == [1, 1]
    assert [version(7, Tier.BATCH, at) for at in (20, 30)] == [2, 3]  # the list's price of the tier, then the tenant's
    assert [version(7, Tier.FLEX, at) for at in (20, 40)] == [3, 3]
    assert all(index.find(7, "other", tier, 99) is None for tier in Tier)


def test_of_two_rate_cards_with_the_same_time_the_newer_one_is_used():
    index = PriceIndex()
    index.add([rate_card(*A.rates, version=1, effective_from=5), rate_card(*B.rates, version=2, effective_from=5)])
    found = index.find(1, "m", Tier.STANDARD, 5)
    assert found is not None
    assert found.version == 2


money = st.integers(0, 10**13)
counts = st.integers(0, 10**7)


@st.composite
def priced(draw: st.DrawFn) -> RateCard:
    """Generate rate cards that price every component for every prompt and time, with arbitrary bands and windows."""
    found = []
    for component in COMPONENTS:
        cuts = sorted(draw(st.sets(st.integers(1, 10**6), max_size=2)))
        hours = sorted(draw(st.sets(st.integers(1, 1439), max_size=2)))
        for low, high in zip([0, *cuts], [*cuts, NO_END], strict=True):
            for start, end in zip([0, *hours], [*hours, 1440], strict=True):
                found.append(Rate(len(found), component, draw(money), low, high, start, end))
    return rate_card(*found)


usages = st.fixed_dictionaries({component: counts for component in COMPONENTS[:5]})


@given(priced(), usages, st.integers(0, 10**16), counts, st.integers(1, 4))
def test_the_settled_cost_is_within_the_reservation(prices, usage, at, more, n):
    prompt = sum(usage[component] for component in INPUTS if component in usage)
    most = -(-usage[C.OUTPUT] // n) + more
    hold = reservation_nano(prices, prompt, most, at, n=n, writes_5m=True, writes_1h=True)
    assert price(prices, TokenCounts(**usage), at).cost_femto <= hold * 1_000_000


@given(priced(), usages, st.integers(0, 10**16))
def test_all_usage_is_priced_and_the_cost_is_monotone(prices, usage, at):
    rated = price(prices, TokenCounts(**usage), at)
    assert rated.price_ids is not None
    assert [price_id is not None for price_id in rated.price_ids] == [
        usage.get(component, 0) > 0 for component in COMPONENTS
    ]
    more = usage | {C.OUTPUT: usage[C.OUTPUT] + 1}  # the prompt determines the band, so only the output can grow freely
    assert price(prices, TokenCounts(**more), at).cost_femto >= rated.cost_femto


@given(priced(), st.lists(st.tuples(usages, st.integers(0, 10**16)), max_size=5))
def test_rating_executions_together_equals_rating_them_separately(prices, executions):
    for usage, at in executions:
        found = prices_of(prices, sum(usage[each] for each in INPUTS if each in usage), at)
        rated = price(prices, TokenCounts(**usage), at)
        assert rated.cost_femto == sum(count * found[each].nano_per_million for each, count in usage.items())
        assert rated.price_ids == [found[each].price_id if usage.get(each) else None for each in COMPONENTS]
