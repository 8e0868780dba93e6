"""Random histories of months: the documents together equal an independent oracle, and each preview its document.

The short form runs with the other tests; `-m slow` runs more and longer histories.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from billing.invoicing import lines
from billing.models import PriceTerm
from billing.rates.proration import DayShare
from billing.rates.terms import TermRule
from tests.support.billing.month_histories import STARTS, Difference, Step, create_tenants, open_history

pytestmark = pytest.mark.django_db
MILLION, DOLLAR = 10**6, 10**9  # a price is in nano-USD per million tokens


def step(name: str, *arguments: st.SearchStrategy[object]) -> st.SearchStrategy[Step]:
    return st.tuples(st.just(name), *arguments)


TENANT, MONTH, DAY, MODEL, INDEX = (st.integers(0, most) for most in (1, 2, 1, 1, 20))
FROM, MONTHS = st.integers(0, 3), st.integers(0, 3)
CENTS, PPM, NANO = st.integers(1, 3_000), st.integers(1, 10**6), st.integers(0, 10 * DOLLAR)
FIRST_DAY = st.one_of(st.just(0), st.integers(1, 31))  # of a prorated charge
TOKENS = st.one_of(st.just(0), st.integers(1, 9 * MILLION))
USE = step("use", TENANT, MONTH, DAY, MODEL, TOKENS, TOKENS)
AGREEMENT = st.one_of(
    step("add_minimum", TENANT, FROM, MONTHS, CENTS, FIRST_DAY),
    step("add_discount", TENANT, FROM, MONTHS, st.integers(0, 2), PPM),
    step("add_tiers", TENANT, FROM, MONTHS, MODEL, st.booleans()),
    step("commit", TENANT, FROM, MONTHS, CENTS, CENTS, FIRST_DAY),
    step("repeat", TENANT, FROM, MONTHS, CENTS),
)
CORRECTION = st.one_of(
    step("reverse", INDEX),
    step("reverse_metered", INDEX),
    step("rerate", TENANT, MODEL, st.integers(0, 2), st.integers(0, 7), st.integers(1, 6), NANO),
    step("credit", INDEX, CENTS),
    step("debit", INDEX, CENTS),
)
STEP = st.one_of(
    USE,
    USE,
    step("invoice"),
    AGREEMENT,
    CORRECTION,
    CORRECTION,
    step("meter", TENANT, MONTH, DAY, MODEL, st.integers(1, 10**9), st.integers(1, 10_000)),
    step("add_one_off", TENANT, MONTH, CENTS),
    step("end_commitment", INDEX, FROM),
    step("end_repeating", INDEX, FROM),
    step("end_term", INDEX, FROM),
    step("delete", TENANT),
    step("restore", TENANT),
    step("issue_notes"),
)


# One history with each type of step.
EVERYTHING: tuple[list[Step], ...] = (
    [
        ("add_tiers", 0, 0, 0, 0, True),
        ("add_tiers", 1, 1, 1, 1, False),
        ("add_discount", 0, 0, 2, 2, 123_457),
        ("add_minimum", 1, 1, 0, 2_999, 20),
        ("commit", 0, 0, 0, 1_000, 500, 31),
        ("repeat", 0, 0, 3, 999),
        ("repeat", 1, 1, 0, 333),
    ],
    [
        ("use", 0, 0, 0, 0, 3_456_789, 77),
        ("use", 0, 0, 1, 1, 12_345, 4_321),
        ("use", 1, 0, 0, 1, 5_000_001, 9),
    ],
    [
        *(("use", 0, 1, day, 1, 1_234_567, 7_654) for day in (0, 1)),  # before and after the change of prices
        ("add_one_off", 1, 1, 777),
        ("meter", 0, 1, 0, 0, 123_456_789, 777),
        ("use", 0, 0, 1, 0, 999_999, 1),  # late
        ("reverse", 0),  # an execution of the first month
        ("rerate", 0, 1, 0, 0, 4, 5 * DOLLAR),
        ("issue_notes",),
        ("invoice",),
        ("rerate", 0, 1, 0, 1, 3, DOLLAR),
        ("rerate", 1, 1, 1, 0, 8, 3 * DOLLAR),
        ("delete", 1),
        ("credit", 0, 55),
        ("debit", 1, 44),
        ("reverse", 1),
        ("end_commitment", 0, 2),
        ("end_repeating", 0, 2),
        ("invoice",),
        ("restore", 1),
        ("end_term", 2, 3),
    ],
)


def check_histories(examples: int, steps: int, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    tenants = create_tenants()

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), phases=phases)
    @example(currency="JPY", agreed=EVERYTHING[0], used=EVERYTHING[1], later=EVERYTHING[2])
    @given(
        currency=st.sampled_from(["EUR", "JPY"]),
        agreed=st.lists(AGREEMENT, max_size=3),
        used=st.lists(USE, min_size=1, max_size=4),
        later=st.lists(STEP, min_size=3, max_size=steps),
    )
    def check(currency: str, agreed: list[Step], used: list[Step], later: list[Step]) -> None:
        with open_history(tenants, currency) as history:
            history.run([*agreed, *used, ("invoice",), *later])

    check()


def test_documents_equal_the_oracle(db):
    # A shorter failing history takes minutes to find.
    check_histories(15, 12, (Phase.explicit, Phase.reuse, Phase.generate))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(4))
def test_many_documents_equal_the_oracle(db, part):
    check_histories(100, 30)


MINIMUM: Step = ("add_minimum", 0, 0, 1, 5_000)
USED: Step = ("use", 0, 0, 0, 0, 3 * MILLION, 0)  # 10.01
METERED: Step = ("meter", 0, 0, 0, 0, 900 * MILLION, 600)  # 40.50
INVOICE: Step = ("invoice",)


def rerate(component: int, *dollars: int) -> list[Step]:
    """Return steps that correct a price of the first month several times."""
    corrected: list[Step] = [("rerate", 0, 0, component, 0, 2, each * DOLLAR) for each in dollars]
    return [step for each in corrected for step in (each, ("issue_notes",))]


# Histories that were billed wrongly once, each with its defect.
REPAIRED: list[tuple[str, list[Step]]] = [
    ("a re-rating absorbed by a minimum was forgotten by the next", [MINIMUM, USED, INVOICE, *rerate(0, 2, 20)]),
    ("the same by way of an amount below the minimum", [MINIMUM, USED, INVOICE, *rerate(0, 13, 20)]),
    ("a price of metered usage was corrected without effect", [METERED, INVOICE, *rerate(2, 1)]),
    ("a minimum was added to metered usage", [MINIMUM, METERED]),
    ("rounding of lines was added to a minimum", [MINIMUM, *(("use", 0, 0, 0, model, 1_500, 507) for model in (0, 1))]),
    ("a reversal absorbed by a minimum had a note of 0.00", [MINIMUM, USED, INVOICE, ("reverse", 0)]),
]


@pytest.mark.parametrize(("defect", "steps"), REPAIRED)
def test_repaired_defects(db, defect, steps):
    with open_history(create_tenants(), "JPY") as history:
        history.run(steps)


def lower_minimum(rule: TermRule) -> TermRule:
    return replace(rule, cents=max(0, rule.cents - 1))


def shift_tiers(rule: TermRule) -> TermRule:
    first, *others = rule.tiers
    return replace(rule, tiers=(first, *(replace(tier, from_tokens=tier.from_tokens + MILLION) for tier in others)))


BROKEN: dict[str, tuple[Callable[[TermRule], TermRule], list[Step]]] = {
    "minimum": (lower_minimum, [MINIMUM, USED]),
    "tier": (shift_tiers, [("add_tiers", 0, 0, 1, 0, False), ("use", 0, 0, 0, 0, 9 * MILLION, 0)]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_term_is_found(db, monkeypatch, name):
    """The product applies another rule than the stored one."""
    change, steps = BROKEN[name]
    tenants, decode = create_tenants(), PriceTerm.decode
    with open_history(tenants, "JPY") as history:
        history.run(steps)
    monkeypatch.setattr(PriceTerm, "decode", lambda term: change(decode(term)))
    with pytest.raises(Difference), open_history(tenants, "JPY") as history:
        history.run(steps)


def test_a_broken_proration_is_found(db, monkeypatch):
    """The product charges a day less than the stored first day says."""
    tenants = create_tenants()
    steps: list[Step] = [("commit", 0, 0, 0, 3_000, 1, 20), USED]
    with open_history(tenants, "JPY") as history:
        history.run(steps)
    prorate = DayShare.prorate
    monkeypatch.setattr(DayShare, "prorate", lambda share, amount: prorate(share._replace(days=share.days - 1), amount))
    with pytest.raises(Difference), open_history(tenants, "JPY") as history:
        history.run(steps)


def test_a_broken_rate_is_found(db, monkeypatch):
    """The product's statement of usage lines adds a cent to the price of a million tokens."""
    tenants = create_tenants()
    with open_history(tenants, "JPY") as history:
        history.run([USED])
    rate = "p.nano_per_million AS femto"
    assert rate in lines._USED
    monkeypatch.setattr(lines, "_USED", lines._USED.replace(rate, "(p.nano_per_million + 10000000) AS femto"))
    with pytest.raises(Difference), open_history(tenants, "JPY") as history:
        history.run([USED])


# The balance of prepaid tenants

OPEN_STEP = st.one_of(
    USE,
    USE,
    step("add_minimum", TENANT, FROM, MONTHS, CENTS, FIRST_DAY),
    step("repeat", TENANT, FROM, MONTHS, CENTS),
    step("add_discount", TENANT, FROM, MONTHS, st.integers(0, 2), PPM),
    step("add_tiers", TENANT, FROM, MONTHS, MODEL, st.booleans()),
    step("meter", TENANT, MONTH, DAY, MODEL, st.integers(1, 10**9), st.integers(1, 10_000)),
    step("add_one_off", TENANT, MONTH, CENTS),
    step("end_term", INDEX, FROM),
    step("end_repeating", INDEX, FROM),
    step("reverse", INDEX),
    step("reverse_metered", INDEX),
)
EVERYTHING_OPEN: list[Step] = [
    ("add_tiers", 0, 0, 0, 0, True),
    ("add_tiers", 1, 1, 1, 1, False),
    ("add_discount", 0, 0, 2, 2, 123_457),
    ("add_discount", 0, 0, 0, 0, 500_000),
    ("add_minimum", 1, 1, 0, 2_999),
    ("add_minimum", 0, 0, 1, 12_345, 11),
    ("repeat", 0, 0, 1, 555),
    ("repeat", 1, 1, 2, 444),
    ("end_repeating", 0, 1),
    ("use", 0, 0, 0, 0, 3_456_789, 77),
    ("use", 0, 0, 1, 1, 12_345, 4_321),
    ("use", 1, 1, 1, 1, 5_000_001, 9),
    ("meter", 0, 1, 0, 0, 123_456_789, 777),
    ("add_one_off", 1, 1, 777),
    ("reverse", 1),
]


def check_balances(examples: int) -> None:
    tenants = create_tenants()

    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    )
    @example(currency="JPY", steps=EVERYTHING_OPEN, month=1, is_start=True)
    @example(currency="EUR", steps=EVERYTHING_OPEN, month=1, is_start=False)
    @given(
        currency=st.sampled_from(["EUR", "JPY"]),
        steps=st.lists(OPEN_STEP, min_size=3, max_size=12),
        month=st.integers(0, 3),
        is_start=st.booleans(),
    )
    def check(currency: str, steps: list[Step], month: int, is_start: bool) -> None:
        now = STARTS[month] if is_start else STARTS[month + 1] - timedelta(microseconds=1)
        with open_history(tenants, currency) as history:
            for name, *arguments in steps:
                getattr(history, name)(*arguments)
            history.compare_balances(now)

    check()


def test_balances_equal_the_oracle(db):
    check_balances(25)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_balances_equal_the_oracle(db):
    check_balances(400)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_term_is_found_in_the_balance(db, monkeypatch, name):
    change, steps = BROKEN[name]
    decode = PriceTerm.decode
    with open_history(create_tenants(), "JPY") as history:
        for method, *arguments in steps:
            getattr(history, method)(*arguments)
        history.compare_balances(STARTS[1])
        monkeypatch.setattr(PriceTerm, "decode", lambda term: change(decode(term)))
        with pytest.raises(Difference):
            history.compare_balances(STARTS[1])
