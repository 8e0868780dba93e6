"""Price terms: tiers by the month's tokens, included tokens, discounts and minimums, in exact femto-USD."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.currencies.amounts import FEMTO_A_CENT
from billing.rates.pricing import Component
from billing.rates.terms import MonthlyUsage, TermRule, TermType, VolumeTier, changes, check_term, tiered_cost

MILLION = 10**6
DOLLAR = 10**9  # nano-USD
KEY = ("m", "standard", "output")
TIERS = (VolumeTier(0, 10 * DOLLAR), VolumeTier(MILLION, 8 * DOLLAR), VolumeTier(10 * MILLION, 5 * DOLLAR))


def tiered(term_type: TermType, *tiers: VolumeTier) -> TermRule:
    return TermRule(term_type, "m", component=Component.OUTPUT, tiers=tiers or TIERS)


@pytest.mark.parametrize(
    ("tokens", "graduated", "volume"),
    [
        (0, 0, 0),
        (MILLION, 1000, 1000),
        (MILLION + 500_000, 1400, 1200),
        (10 * MILLION, 8200, 8000),
        (12 * MILLION, 9200, 6000),
    ],
)
def test_cents_of_tiers(tokens, graduated, volume):
    assert tiered_cost(tiered(TermType.GRADUATED), tokens) == graduated * FEMTO_A_CENT
    assert tiered_cost(tiered(TermType.VOLUME), tokens) == volume * FEMTO_A_CENT


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_graduated_cost_never_falls_with_tokens(one, other):
    rule = tiered(TermType.GRADUATED)
    assert tiered_cost(rule, min(one, other)) <= tiered_cost(rule, max(one, other))


def test_included_tokens_with_overage_then_discount_then_minimum():
    """2M of 3M tokens are included, the overage costs $4; 10% off is $3.60; the minimum adds $1.40."""
    rules = [
        TermRule(TermType.MINIMUM, cents=500),
        TermRule(TermType.DISCOUNT, ppm=100_000),
        tiered(TermType.GRADUATED, VolumeTier(0, 0), VolumeTier(2 * MILLION, 4 * DOLLAR)),
    ]
    usage = {KEY: MonthlyUsage(3 * MILLION, 3000 * FEMTO_A_CENT)}
    assert changes(rules, usage, "USD") == [140 * FEMTO_A_CENT, -40 * FEMTO_A_CENT, -2600 * FEMTO_A_CENT]
    assert changes(rules, {}, "USD") == [500 * FEMTO_A_CENT, 0, 0]
    other = {("x", "standard", "output"): MonthlyUsage(1, 700 * FEMTO_A_CENT)}
    assert changes([*rules[1:], TermRule(TermType.DISCOUNT, "m", ppm=500_000)], other, "USD") == [
        -70 * FEMTO_A_CENT,
        0,
        0,
    ]


def test_a_minimum_covers_metered_usage_and_a_discount_does_not_change_it():
    rules = [TermRule(TermType.MINIMUM, cents=1000), TermRule(TermType.DISCOUNT, ppm=500_000)]
    usage = {KEY: MonthlyUsage(1, 100 * FEMTO_A_CENT)}
    assert changes(rules, usage, "USD", 900 * FEMTO_A_CENT) == [50 * FEMTO_A_CENT, -50 * FEMTO_A_CENT]
    assert changes(rules, usage, "USD", 960 * FEMTO_A_CENT) == [0, -50 * FEMTO_A_CENT]


def test_the_highest_of_several_minimums_applies():
    rules = [TermRule(TermType.MINIMUM, cents=200), TermRule(TermType.MINIMUM, cents=500)]
    assert sum(changes(rules, {KEY: MonthlyUsage(1, 100 * FEMTO_A_CENT)}, "USD")) == 400 * FEMTO_A_CENT


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (TermRule(TermType.GRADUATED, "m", component=Component.OUTPUT), "tiers"),
        (TermRule(TermType.VOLUME, component=Component.OUTPUT, tiers=TIERS), "model"),
        (TermRule(TermType.VOLUME, "m", component=Component.OUTPUT, tiers=TIERS[1:]), "tiers"),
        (TermRule(TermType.DISCOUNT), "ppm"),
        (TermRule(TermType.DISCOUNT, ppm=1_000_001), "ppm"),
        (TermRule(TermType.MINIMUM), "cents"),
        (TermRule(TermType.MINIMUM, "m", cents=5), "model"),
    ],
)
def test_an_invalid_term_names_the_field(rule, name):
    with pytest.raises(ValueError, match=name):
        check_term(rule)
