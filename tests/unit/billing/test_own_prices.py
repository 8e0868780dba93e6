"""The usage at list prices that an amount pays at own prices: never more than it pays, and all of it at one ratio."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.currencies.amounts import FEMTO_A_NANO, MAX_BALANCE
from billing.rates.own_prices import PaidUsage, TermMonth, compute_affordable
from billing.rates.pricing import Component
from billing.rates.terms import MonthlyUsage, TermRule, TermType, UsageKey, VolumeTier, changes

MILLION = 10**6
DOLLAR, DOLLARS = 10**9, 10**15  # nano and femto
KEY = ("m", "standard", "output")
LIST = {KEY: 10 * DOLLAR}


def discount(percent: int, model: str = "") -> TermRule:
    return TermRule(TermType.DISCOUNT, model, ppm=percent * 10_000)


def tiered(term_type: TermType, *tiers: tuple[int, int], model: str = "m") -> TermRule:
    rows = tuple(VolumeTier(start, nano) for start, nano in tiers)
    return TermRule(term_type, model, component=Component.OUTPUT, tiers=rows)


def pays(*rules: TermRule, tokens: int = 0, models: tuple[str, ...] = ("", "m"), amount: int = 100) -> PaidUsage:
    """Return the usage that $100 pay after the tokens of $10 a million."""
    usage = {KEY: MonthlyUsage(tokens, tokens * 10 * DOLLAR)} if tokens else {}
    return compute_affordable(amount * DOLLARS, [TermMonth(rules, usage)], models, LIST)


GRADUATED, VOLUME = TermType.GRADUATED, TermType.VOLUME


@pytest.mark.parametrize(
    ("rules", "tokens", "dollars", "is_exact"),
    [
        ([], 0, 100, True),
        ([TermRule(TermType.MINIMUM, cents=5000)], 0, 100, True),
        ([discount(50)], 0, 200, True),
        ([discount(50), discount(20)], 0, 250, True),
        ([discount(50, "m")], 0, 100, False),  # other models have no discount
        ([tiered(GRADUATED, (0, 20 * DOLLAR))], 0, 50, False),
        ([tiered(GRADUATED, (0, 5 * DOLLAR))], 0, 100, False),
        ([tiered(GRADUATED, (0, 20 * DOLLAR)), discount(50)], 0, 100, False),
        # 4M tokens cost $40 as on the list, and the other $60 pay 3M tokens of $20, which are $30 on the list.
        ([tiered(GRADUATED, (0, 10 * DOLLAR), (4 * MILLION, 20 * DOLLAR))], 0, 70, False),
        ([tiered(GRADUATED, (0, 10 * DOLLAR), (4 * MILLION, 20 * DOLLAR))], 3 * MILLION, 55, False),
        ([tiered(GRADUATED, (0, 20 * DOLLAR), (4 * MILLION, 10 * DOLLAR))], 4 * MILLION, 100, False),
        # The first token after 4M costs $20 and $10 for each million before: $40. The $20 that are left pay a million.
        ([tiered(VOLUME, (0, 10 * DOLLAR), (4 * MILLION, 20 * DOLLAR))], 0, 50, False),
        ([tiered(VOLUME, (0, 10 * DOLLAR), (4 * MILLION, 20 * DOLLAR))], 4 * MILLION, 30, False),
        ([tiered(VOLUME, (0, 10 * DOLLAR), (8 * MILLION, 20 * DOLLAR))], 0, 80, False),  # $20 do not pay the $80
        ([tiered(VOLUME, (0, 10 * DOLLAR), (8 * MILLION, 5 * DOLLAR))], 7 * MILLION, 100, False),
    ],
)
def test_usage_that_a_hundred_dollars_pay(rules, tokens, dollars, is_exact):
    assert pays(*rules, tokens=tokens) == (dollars * DOLLARS, is_exact)


def test_models_without_prices_do_not_count():
    assert pays(discount(50, "m"), models=("m",)) == (200 * DOLLARS, True)
    unpriced = tiered(GRADUATED, (0, 20 * DOLLAR), model="x")
    assert compute_affordable(100 * DOLLARS, [TermMonth([unpriced], {})], ("",), {}) == (100 * DOLLARS, True)


def test_a_price_for_what_is_free_on_the_list_admits_nothing():
    rule = tiered(GRADUATED, (0, 0), (MILLION, 1))
    assert compute_affordable(100 * DOLLARS, [TermMonth([rule], {})], ("",), {KEY: 0}) == (0, False)
    free = tiered(GRADUATED, (0, 0))
    assert compute_affordable(100 * DOLLARS, [TermMonth([free], {})], ("",), {KEY: 0}) == (100 * DOLLARS, False)


def test_free_usage_is_limited_by_the_largest_balance():
    assert pays(discount(100)) == (MAX_BALANCE * FEMTO_A_NANO, True)


def test_the_most_expensive_of_several_months_counts():
    """While one month ends and another begins, usage of both may be settled."""
    months = [TermMonth([discount(50)], {}), TermMonth([], {})]
    assert compute_affordable(100 * DOLLARS, months, ("",), {}) == (100 * DOLLARS, False)
    assert compute_affordable(100 * DOLLARS, months[:1] * 2, ("",), {}) == (200 * DOLLARS, True)


def test_a_negative_amount_remains():
    assert pays(discount(50), amount=-3) == (-3 * DOLLARS, True)


MODELS = ("a", "b")
NANO = st.integers(1, 20 * DOLLAR)
TIERS = st.lists(st.tuples(st.integers(1, 5 * MILLION), st.integers(0, 20 * DOLLAR)), max_size=3)


@st.composite
def term_rules(draw: st.DrawFn) -> TermRule:
    kind = draw(st.sampled_from(list(TermType)))
    model = draw(st.sampled_from(MODELS))
    if kind == TermType.DISCOUNT:
        return TermRule(kind, draw(st.sampled_from(["", model])), ppm=draw(st.integers(1, MILLION)))
    if kind == TermType.MINIMUM:
        return TermRule(kind, cents=draw(st.integers(1, 10_000)))
    rows = {start: VolumeTier(start, nano) for start, nano in [(0, draw(st.integers(0, 20 * DOLLAR))), *draw(TIERS)]}
    return TermRule(kind, model, component=Component.OUTPUT, tiers=tuple(rows[start] for start in sorted(rows)))


def own_cost(rules: list[TermRule], tokens: Mapping[str, int], prices: Mapping[str, int]) -> int:
    """Return what a month's tokens of each model cost at own prices, without the minimum."""
    usage: dict[UsageKey, MonthlyUsage] = {
        (model, "standard", "output"): MonthlyUsage(count, count * prices[model])
        for model, count in tokens.items()
        if count
    }
    charged = [rule for rule in rules if rule.term_type != TermType.MINIMUM]
    return sum(item.femto for item in usage.values()) + sum(changes(charged, usage, "USD"))


@given(
    rules=st.lists(term_rules(), max_size=4),
    prices=st.fixed_dictionaries({model: NANO for model in MODELS}),
    before=st.fixed_dictionaries({model: st.integers(0, 6 * MILLION) for model in MODELS}),
    cents=st.integers(1, 30_000),
    share=st.integers(0, 100),
)
def test_the_usage_never_costs_more_than_the_amount(rules, prices, before, cents, share):
    """All of the usage may be of one model, or a part of each."""
    keys = {(model, "standard", "output"): nano for model, nano in prices.items()}
    usage = {key: MonthlyUsage(before[key[0]], before[key[0]] * nano) for key, nano in keys.items() if before[key[0]]}
    amount = cents * DOLLARS // 100
    found = compute_affordable(amount, [TermMonth(rules, usage)], MODELS, keys)
    for parts in ((share, 100 - share), (100, 0), (0, 100)):
        after = {
            model: before[model] + found.femto * part // 100 // prices[model]
            for model, part in zip(MODELS, parts, strict=True)
        }
        spent = own_cost(rules, after, prices) - own_cost(rules, before, prices)
        assert spent <= amount + 100  # each discount rounds to a femto-unit
        if found.is_exact and found.femto < MAX_BALANCE * FEMTO_A_NANO:
            assert spent >= amount - 2 * max(prices.values()) - 100  # less than a token of each model is left
