"""The balance of prepaid tenants with price terms: what they owe at their own prices, and what the gate admits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from billing.invoicing import month_usage, prepayment
from billing.invoicing.drafts import do_draft
from billing.invoicing.due_months import find_due_months
from billing.invoicing.lines import find_usage
from billing.invoicing.month_usage import read_usage
from billing.invoicing.one_off_lines import do_add_one_off_line
from billing.invoicing.prepayment import REFRESH, available_nano
from billing.invoicing.price_terms import do_add_price_term
from billing.invoicing.setup import do_set_prepaid
from billing.invoicing.term_months import LEAD
from billing.ledger.booking import booking
from billing.ledger.credits import do_commit, do_follow_credits
from billing.models import (
    BillingProfile,
    Budget,
    BudgetPeriod,
    PeriodUsage,
    Price,
    UsageEvent,
)
from billing.pricing.prices import do_propose_prices, do_publish_prices
from billing.rates.price_book import NewPrice, Proposal
from billing.rates.pricing import Component, Tier
from billing.rates.terms import TermRule, TermType, VolumeTier
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tests.support.billing.books import (
    DECEMBER,
    NOVEMBER,
    invoiced,
    period,
    start_credit_in_november,
    take_back,
    use,
)
from tests.support.billing.invoice_forms import furnish
from tests.support.billing.prepaid_credit import CENT, pay
from tests.support.rows import unscoped
from tests.support.waiting import eventually

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MILLION, DOLLAR = 10**6, 10**9
MONTH, NOW = "2026-11", datetime(2026, 11, 9, 12, tzinfo=UTC)  # see `in_november`
HALF = TermRule(TermType.DISCOUNT, ppm=500_000)


@pytest.fixture(autouse=True)
def in_november(monkeypatch: pytest.MonkeyPatch) -> None:
    start_credit_in_november(monkeypatch)


@pytest.fixture
def acme(acme: Tenant) -> Tenant:
    """A prepaid tenant with 100.00 of credit. Models cost $10 a million tokens."""
    furnish(acme)
    publish(10, since=datetime(2026, 1, 1, tzinfo=UTC))
    do_set_prepaid(acme, is_prepaid=True)
    pay(10_000, as_credit=True)
    return acme


def publish(dollars: int, since: datetime, models: Sequence[str] = ("alpha", "beta")) -> None:
    prices = [
        NewPrice(model, Tier.STANDARD, component, dollars * DOLLAR)
        for model in models
        for component in (Component.UNCACHED, Component.OUTPUT)
    ]
    do_publish_prices(do_propose_prices(Proposal(tuple(prices)), effective_from=since), by=None)


def tiers(term_type: TermType, *rows: tuple[int, int]) -> TermRule:
    """Return tiers of the output of the model alpha: millions of tokens and dollars per million."""
    steps = tuple(VolumeTier(start * MILLION, dollars * DOLLAR) for start, dollars in rows)
    return TermRule(term_type, "alpha", component=Component.OUTPUT, tiers=steps)


def add_term(tenant: Tenant, rule: TermRule, last_month: str = MONTH) -> None:
    do_add_price_term(tenant, rule, description="Agreed", first_month=MONTH, last_month=last_month)


def price_id(model: str, at: datetime) -> int:
    (found,) = [
        row.pk
        for row in unscoped(Price).filter(model=model, component="output", effective_from__lte=at)
        if row.effective_until is None or row.effective_until > at
    ]
    return found


def settle(tenant: Tenant, millions: int, model: str = "alpha", at: datetime = NOVEMBER) -> None:
    """Settle usage of $10 a million tokens as the settler does: the event and the used amount of the gate."""
    (gate,) = unscoped(Budget).filter(is_balance=True, active=True)
    with all_tenants_scope(BypassReason.SETTLER):
        row, _ = BudgetPeriod.objects.all_tenants().get_or_create(
            tenant_id=tenant.pk, budget_id=gate.pk, unit="money", period_start=datetime(1970, 1, 1, tzinfo=UTC)
        )
        row = BudgetPeriod.objects.all_tenants().select_for_update(no_key=True).get(pk=row.pk)
        use(tenant, at, (price_id(model, at), millions * MILLION))
        row.used = int(row.used) + millions * 10 * 10**15
        row.save()


def follow(tenant: Tenant) -> None:
    """Let the gate follow the balance, as after a booking."""
    with booking(tenant.pk):
        pass


class Rest(NamedTuple):
    """What is left, in cents: of the balance at own prices, and of the gate's limit at list prices."""

    balance: int
    gate: int


def rest(tenant: Tenant, now: datetime = NOVEMBER) -> Rest:
    (gate,) = unscoped(Budget).filter(is_balance=True, active=True)
    used = sum(int(row.used) for row in unscoped(BudgetPeriod).filter(budget_id=gate.pk))
    return Rest(available(tenant, now) // CENT, (gate.amount * 10**6 - used) // 10**13)


def available(tenant: Tenant, now: datetime) -> int:
    with all_tenants_scope(BypassReason.BILLING):
        profile = BillingProfile.objects.for_tenant(tenant).select_related("entity").get()
        return available_nano(tenant, profile, now)


def changes_at(tenant: Tenant) -> datetime | None:
    found: datetime | None = unscoped(BillingProfile).get(tenant=tenant).balance_changes_at
    return found


GRADUATED, VOLUME = TermType.GRADUATED, TermType.VOLUME


@pytest.mark.parametrize(
    ("rules", "millions", "left"),
    [
        ([], 3, Rest(7000, 7000)),
        ([HALF], 0, Rest(10_000, 20_000)),
        ([HALF], 4, Rest(8000, 16_000)),
        ([HALF, TermRule(TermType.DISCOUNT, "alpha", ppm=500_000)], 4, Rest(9000, 18_000)),  # beta costs $5
        ([TermRule(TermType.DISCOUNT, "alpha", ppm=500_000)], 4, Rest(8000, 8000)),  # beta costs $10
        ([tiers(GRADUATED, (0, 20))], 2, Rest(6000, 3000)),
        ([tiers(GRADUATED, (0, 20)), HALF], 2, Rest(8000, 8000)),
        ([tiers(GRADUATED, (0, 5))], 2, Rest(9000, 9000)),
        ([tiers(GRADUATED, (0, 0), (2, 10))], 3, Rest(9000, 9000)),  # two million tokens are included
        ([tiers(VOLUME, (0, 10), (2, 20))], 2, Rest(8000, 3000)),  # the next token costs $20 and $10 for each before
        ([tiers(VOLUME, (0, 10), (2, 20))], 3, Rest(4000, 2000)),
        ([TermRule(TermType.MINIMUM, cents=5000)], 0, Rest(10_000, 10_000)),
        ([TermRule(TermType.MINIMUM, cents=5000)], 2, Rest(8000, 8000)),
        ([TermRule(TermType.MINIMUM, cents=5000), HALF], 2, Rest(9000, 18_000)),
    ],
)
def test_the_balance_counts_usage_at_own_prices(acme, rules, millions, left):
    for rule in rules:
        add_term(acme, rule)
    if millions:
        settle(acme, millions)
    follow(acme)
    assert rest(acme) == left


def test_fees_and_one_off_lines_that_are_due_are_owed(acme):
    do_commit(acme, "Base", fee=6_000, included_nano=CENT, first_month=MONTH)
    assert rest(acme) == (4_001, 4_001)
    do_add_one_off_line(acme, month=MONTH, description="Setup", cents=1_000)
    do_add_one_off_line(acme, month="2026-12", description="Next month", cents=500)
    assert rest(acme) == (3_001, 3_001)
    do_draft(period(NOVEMBER), acme)
    follow(acme)
    assert rest(acme) == (3_001, 3_001)
    assert available(acme, DECEMBER) == (10_000 - 12_000 - 1_500 + 1) * CENT


def test_included_usage_is_admitted_without_credit_and_at_own_prices(acme):
    pay(-10_000, "r1", tenant="", refund_of="p1")
    do_commit(acme, "Base", fee=0, included_nano=1_000 * CENT, first_month=MONTH)
    assert rest(acme) == (1_000, 1_000)
    add_term(acme, HALF)
    assert rest(acme) == (1_000, 2_000)


def test_a_minimum_is_owed_at_the_end_of_its_month(acme):
    add_term(acme, TermRule(TermType.MINIMUM, cents=5_000))
    settle(acme, 3)
    end = period(NOVEMBER).ends_at
    assert available(acme, end - timedelta(seconds=1)) == 7_000 * CENT
    assert available(acme, end) == 5_000 * CENT
    settle(acme, 1, at=DECEMBER)
    assert available(acme, end) == 4_000 * CENT
    invoice = invoiced(acme, NOVEMBER)  # credit pays the minimum
    assert (invoice.subtotal, available(acme, end)) == (5_000, 4_000 * CENT)


@pytest.fixture
def at(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> Callable[[datetime], tuple[int, int]]:
    """Return a function that follows the balance at a time, and returns the number of updates and the gate's rest."""

    def follow_at(now: datetime) -> tuple[int, int]:
        monkeypatch.setattr(prepayment, "datetime", SimpleNamespace(now=lambda zone: now))
        return do_follow_credits(now), rest(acme, now).gate

    return follow_at


def test_the_terms_of_the_next_month_count_before_it_begins(acme, at):
    """A discount ends: before the last minutes of its month, the gate is as low as without it."""
    add_term(acme, HALF)
    end = period(NOVEMBER).ends_at
    assert (rest(acme), changes_at(acme)) == ((10_000, 20_000), end - LEAD)

    assert at(end - LEAD - timedelta(seconds=1)) == (0, 20_000)
    assert at(end - LEAD) == (1, 10_000)
    settle(acme, 4)
    assert at(end - timedelta(seconds=1)) == (1, 8_000)  # $80 of $100 are left, of which list prices may take all
    assert at(end) == (1, 8_000)
    assert at(end + timedelta(days=1)) == (1, 8_000)
    assert at(end + timedelta(days=2))[0] == 0


def test_a_price_that_falls_below_a_tier_counts_before_it_applies(acme, at):
    add_term(acme, tiers(GRADUATED, (0, 20)))
    assert (rest(acme).gate, changes_at(acme)) == (5_000, NOW + REFRESH)
    publish(4, since=NOW + timedelta(hours=1), models=["alpha"])
    assert at(NOW + timedelta(hours=1) - LEAD - timedelta(seconds=1)) == (1, 5_000)
    assert at(NOW + timedelta(hours=1) - LEAD + REFRESH) == (1, 2_000)  # $20 are five times $4


def test_the_limit_follows_usage_at_a_lower_price(acme):
    """The gate expects $20 a million tokens. Usage of another model costs $10, and leaves a rest."""
    add_term(acme, tiers(GRADUATED, (0, 20)))
    settle(acme, 4, model="beta")
    assert (rest(acme), changes_at(acme)) == ((6_000, 1_000), NOW + REFRESH)
    assert do_follow_credits(changes_at(acme)) == 1
    assert rest(acme) == (6_000, 3_000)
    settle(acme, 3)
    follow(acme)
    assert (rest(acme), changes_at(acme)) == ((0, 0), period(NOVEMBER).ends_at - LEAD)  # nothing is left to compute


def test_a_reversal_of_invoiced_usage_counts_before_its_correction(acme):
    add_term(acme, HALF, last_month="2026-12")
    settle(acme, 4)
    invoiced(acme, NOVEMBER)
    assert available(acme, DECEMBER) == 8_000 * CENT
    (event,) = unscoped(UsageEvent).all()
    take_back(event, datetime.now(UTC))
    assert available(acme, DECEMBER) == 10_000 * CENT


# Stored sums


def test_the_sums_of_usage_are_stored_and_later_usage_is_added(acme, monkeypatch):
    month, now = period(NOVEMBER), datetime.now(UTC)
    for place, minutes in enumerate((300, 200, 100, 50, 0), start=1):
        settled_at = now - timedelta(minutes=minutes)
        use(acme, NOVEMBER, (price_id("alpha", NOVEMBER), place), settled_at=settled_at)
    take_back(unscoped(UsageEvent).get(output=2), now - timedelta(minutes=150))
    stored = []
    with all_tenants_scope(BypassReason.BILLING):
        PeriodUsage.objects.for_tenant(acme).delete()  # of bookings before these settlements
        for minutes in (240, 110, 20):  # three readings, at times between which events are settled
            monkeypatch.setattr(month_usage, "OVERLAP", timedelta(minutes=minutes))
            assert read_usage([month], acme.pk)[month.pk] == find_usage(month, acme.pk)[acme.pk]
            (row,) = PeriodUsage.objects.for_tenant(acme)
            stored.append([(line["tokens"], line["events"]) for line in row.lines])
    assert stored == [[(1, 1)], [(1, 3)], [(1 + 3 + 4, 5)]]  # tokens and events, with the reversal


def test_stored_usage_is_not_read_again(acme, monkeypatch):
    month = period(NOVEMBER)
    use(acme, NOVEMBER, (price_id("alpha", NOVEMBER), 7), settled_at=datetime.now(UTC) - timedelta(hours=1))
    with all_tenants_scope(BypassReason.BILLING):
        PeriodUsage.objects.for_tenant(acme).delete()  # of bookings before the settlement
        read_usage([month], acme.pk)
        row = PeriodUsage.objects.for_tenant(acme).get(period_id=month.pk)
        row.lines[0]["tokens"] = 9
        row.save()
        (line,) = read_usage([month], acme.pk)[month.pk]
        assert line.tokens == 9
        month.closed_at = row.settled_before - month_usage.OVERLAP  # no more events
        row.lines = []
        row.save()
        monkeypatch.setattr(month_usage, "find_usage", None)
        assert read_usage([month], acme.pk) == {month.pk: []}


def test_many_events_are_read_before_settlements_are_delayed(acme):
    with all_tenants_scope(BypassReason.BILLING):
        PeriodUsage.objects.for_tenant(acme).delete()
    with CaptureQueriesContext(connection) as captured:
        follow(acme)
    statements = [query["sql"] for query in captured]
    stored = [place for place, sql in enumerate(statements) if sql.startswith('INSERT INTO "billing_periodusage"')]
    (locked,) = [place for place, sql in enumerate(statements) if "FOR NO KEY UPDATE) period" in sql]
    assert stored
    assert max(stored) < locked


# Concurrency


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("table")
def test_a_settlement_waits_until_the_limit_is_set(acme, monkeypatch):
    """Usage that is settled between the readings of used amount and usage is in neither or both."""
    settle(acme, 1)
    threads: list[threading.Thread] = []

    def settle_meanwhile(*given: Any) -> Any:
        thread = threading.Thread(target=_settle_and_close, args=[acme])
        thread.start()
        threads.append(thread)
        eventually(lambda: not thread.is_alive() or _is_blocked())
        return find_due_months(*given)

    with monkeypatch.context() as patched:
        patched.setattr(prepayment, "find_due_months", settle_meanwhile)
        follow(acme)
    threads[0].join()
    assert rest(acme) == (7_000, 7_000)


def _settle_and_close(tenant: Tenant) -> None:
    try:
        settle(tenant, 2)
    finally:
        connection.close()


def _is_blocked() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)")
        return bool(cursor.fetchone()[0])
