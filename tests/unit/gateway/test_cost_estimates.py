"""The reservation of a request covers any candidate, or all candidates if all are billed."""

from __future__ import annotations

from decimal import Decimal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.currencies.amounts import whole_units
from billing.rates.pricing import Component, Rate, RateCard, Tier, price
from billing.reservations.budget_leases import ReservedAmount
from inference_worker.contract.request import CacheBreakpoint, TokenCounts
from millrace.gateway.admission.admission import AdmissionRequest
from millrace.gateway.admission.budget_admission import BudgetAdmission
from millrace.gateway.admission.cost_estimate import CostEstimate
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import Prompt
from tests.support.gateway.budget_gateways import MODEL, key_of
from tests.support.gateway.keys import make_demand

KEY = key_of(1, 1, 1)
PRICES = st.integers(0, 10**11)


@st.composite
def rate_cards(draw: st.DrawFn) -> tuple[RateCard, ...]:
    return tuple(
        RateCard(version, None, "m", Tier.STANDARD, 0, tuple(Rate(1, each, draw(PRICES)) for each in Component))
        for version in range(1, draw(st.integers(1, 4)) + 1)
    )


def demand_of(prompt: int, sequences: int = 1, searches: int = 0) -> AdmissionRequest:
    demand = make_demand(KEY, max_tokens=None, models=[MODEL], n=sequences)
    given = Prompt(range(prompt), (CacheBreakpoint(1, 300),), searches=searches)  # type: ignore[arg-type]
    return msgspec.structs.replace(demand, prompt=given)


@given(
    rate_cards=rate_cards(),
    prompt=st.integers(1, 10**6),
    length=st.integers(0, 10**5),
    n=st.integers(1, 4),
    searches=st.integers(0, 3),
    data=st.data(),
)
def test_the_cost_of_each_candidate_is_within_the_reservation(
    rate_cards: tuple[RateCard, ...], prompt: int, length: int, n: int, searches: int, data: st.DataObject
) -> None:
    amount = CostEstimate(demand_of(prompt, n, searches), rate_cards).amount(length)
    for rate_card in rate_cards:
        cuts = sorted(data.draw(st.lists(st.integers(0, prompt), min_size=2, max_size=2)))
        output = data.draw(st.integers(0, length * n))
        usage = TokenCounts(cuts[0], cuts[1] - cuts[0], prompt - cuts[1], output=output, searches=searches)
        used = ReservedAmount(whole_units(price(rate_card, usage, 0).cost_femto), prompt + output, 1)
        assert all(each <= bound for each, bound in zip(used, amount, strict=True))


@given(rate_cards=rate_cards(), prompt=st.integers(1, 10**6), length=st.integers(0, 10**5))
def test_alternatives_reserve_the_most_expensive_candidate(
    rate_cards: tuple[RateCard, ...], prompt: int, length: int
) -> None:
    single = [CostEstimate(demand_of(prompt), (rate_card,)).amount(length) for rate_card in rate_cards]
    assert CostEstimate(demand_of(prompt), rate_cards).amount(length) == max(single)
    assert single[0].requests == 1


@given(
    rate_cards=rate_cards(),
    prompt=st.integers(1, 10**6),
    money=st.integers(0, 10**13),
    tokens=st.integers(0, 10**7),
    n=st.integers(1, 4),
)
def test_the_affordable_output_fits_and_one_more_token_does_not(
    rate_cards: tuple[RateCard, ...], prompt: int, money: int, tokens: int, n: int
) -> None:
    bill = CostEstimate(demand_of(prompt, n), rate_cards)
    left = ReservedAmount(money, tokens, 4)
    found = bill.affordable(left)
    if found >= 1:
        assert all(need <= have for need, have in zip(bill.amount(found)[:2], left[:2], strict=True))
    more = bill.amount(max(found, 0) + 1)
    assert more.money > left.money or more.tokens > left.tokens


def test_worked_example_8_affordable_output() -> None:
    usd = {"uncached": "3", "cache_write_5m": "3.75", "cache_read": "0.30", "output": "15"}
    rates = tuple(Rate(1, Component(name), int(Decimal(each) * 10**9)) for name, each in usd.items())
    demand = make_demand(KEY, prompt=10_000, max_tokens=None, models=[MODEL])
    bill = CostEstimate(demand, (RateCard(1, None, "m", Tier.STANDARD, 0, rates),))
    assert bill.affordable(ReservedAmount(50_000_000, 10**9, 1)) == 1333
    assert bill.amount(1333).money <= 50_000_000 < bill.amount(1334).money
    assert bill.affordable(ReservedAmount(29_999_999, 10**9, 1)) == 0


def test_each_search_is_reserved() -> None:
    rates = tuple(Rate(1, each, 3 * 10**6 if each == Component.SEARCHES else 10**6) for each in Component)
    cards = (RateCard(1, None, "m", Tier.STANDARD, 0, rates),)
    assert [CostEstimate(demand_of(5, 1, searches), cards).amount(0).money for searches in (0, 2)] == [5, 11]


def test_the_first_candidate_requires_a_price() -> None:
    budget_admission = BudgetAdmission(None, None, None)  # type: ignore[arg-type]  # nothing is reserved
    budget_admission.has_prices = True
    priced = RateCard(1, None, MODEL.name, Tier.STANDARD, 0, (Rate(1, Component.OUTPUT, 1),))
    budget_admission.prices.add([priced])

    def estimate(*models: ServedModel) -> CostEstimate:
        return budget_admission.estimate(make_demand(KEY, prompt=1, max_tokens=1, models=list(models), admitted_at=1))

    assert estimate(MODEL, _other()).rate_cards == (priced,)
    with pytest.raises(ApiError) as exc_info:
        estimate(_other(), MODEL)
    assert exc_info.value.code == "model_not_priced"
    assert "'other'" in exc_info.value.message


def _other() -> ServedModel:
    return ServedModel("other", None, 1, 1, 0)  # type: ignore[arg-type]
