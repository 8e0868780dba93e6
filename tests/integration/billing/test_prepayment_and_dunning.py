"""The gate of prepaid tenants, which follows their balance, and suspensions by dunning."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from types import SimpleNamespace

import pytest
from django.core import mail

from billing.budgets.budgets import do_change_budget, do_remove_budget
from billing.invoicing import dunning, emails
from billing.invoicing.corrections import do_issue_credit_note
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.dunning import suspend_overdue
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.one_off_lines import do_add_one_off_line, do_count_due_lines
from billing.invoicing.prepayment import available_nano
from billing.invoicing.purchases import do_sell_credit
from billing.invoicing.setup import do_set_prepaid, do_set_profile
from billing.ledger.booking import booking
from billing.ledger.credits import do_commit, do_follow_credits, do_grant_credit
from billing.metering.metered import do_record_metered_usage
from billing.models import (
    BillingEntity,
    BillingProfile,
    Budget,
    BudgetPeriod,
    CreditGrant,
    Invoice,
    InvoiceEmail,
    LedgerEntry,
)
from billing.pricing.prices import do_propose_prices, do_publish_prices
from billing.rates.price_files import read_csv
from billing.rates.pricing import Component
from frontend.core.numbers import Money
from frontend.tenant.invoices.states import open_balances, state_of, today_of
from tenants.actions import Conflict, do_delete_tenant, do_resume_tenant, do_suspend_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import ChangeEventRow, Tenant
from tests.support.billing.books import (
    NOVEMBER,
    OCTOBER,
    invoiced,
    over,
    period,
    price,
    start_credit_in_november,
    use,
)
from tests.support.billing.invoice_forms import furnish
from tests.support.billing.prepaid_credit import CENT, MULTI, SINGLE, bill, change_entity, pay
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("in_november"), pytest.mark.acme(months=True)]


@pytest.fixture
def in_november(monkeypatch: pytest.MonkeyPatch) -> None:
    start_credit_in_november(monkeypatch)


@pytest.fixture
def acme(acme: Tenant) -> Tenant:
    furnish(acme, "S", 250_000)
    return acme


def gates(*, active: bool = True) -> list[Budget]:
    return list(unscoped(Budget).filter(is_balance=True, active=active))


def limit() -> int:
    """Return the limit of the gate in cents, less what it has used."""
    (gate,) = gates()
    used = sum(int(row.used) for row in unscoped(BudgetPeriod).filter(budget_id=gate.pk))
    return (gate.amount * 10**6 - used) // 10**13


def spend(tenant: Tenant, dollars: str) -> None:
    """Settle usage as the settler does: the event and the used amount of the gate."""
    (gate,) = gates()
    pk = price(dollars, model=f"m{dollars}")
    use(tenant, NOVEMBER, (pk, 10**6))
    start = datetime(1970, 1, 1, tzinfo=UTC)
    with all_tenants_scope(BypassReason.BILLING):
        row, _ = BudgetPeriod.objects.all_tenants().get_or_create(
            tenant_id=tenant.pk, budget_id=gate.pk, unit="money", period_start=start
        )
        row.used = int(row.used) + int(dollars) * 10**15
        row.save()


@pytest.mark.parametrize("voucher_type", [SINGLE, MULTI])
def test_the_gate_of_a_prepaid_tenant_follows_its_balance(acme, voucher_type):
    """$125 with tax of 25 % allow usage of $100, whenever the tax is due."""
    change_entity(voucher_type=voucher_type)
    assert not gates()
    do_set_prepaid(acme, is_prepaid=True)
    assert (limit(), gates()[0].mode, gates()[0].period) == (0, "hard", "lifetime")
    changes = unscoped(ChangeEventRow).count()
    pay(12_500, as_credit=True)
    assert (limit(), unscoped(ChangeEventRow).count()) == (10_000, changes + 1)
    spend(acme, "30")
    amount = gates()[0].amount
    do_set_profile(acme, po_number="1")  # a booking after settlement finds the same limit
    assert (gates()[0].amount, limit()) == (amount, 7_000)
    do_grant_credit(acme, CreditGrant.GrantType.PROMOTIONAL, 1_000 * CENT)
    assert limit() == 8_000
    invoice = bill(acme, "10", number=2)  # $40 in all; was not counted by the gate
    assert (invoice.total - invoice.prepaid, limit()) == (0, 7_000)
    pay(-2_500, "r1", tenant="", refund_of="p1")
    assert limit() == 5_000
    do_issue_credit_note(invoice, [("SLA", 1_000)], "SLA")
    assert limit() == 6_000
    pay(1_250, "p3")  # a deposit pays the next invoice
    assert limit() == 7_000
    with pytest.raises(Conflict, match="Buy credit"):
        do_change_budget(gates()[0], amount=10**12)
    with pytest.raises(Conflict, match="Buy credit"):
        do_remove_budget(gates()[0])
    do_set_prepaid(acme, is_prepaid=False)
    assert (gates(), len(gates(active=False))) == ([], 1)


def test_a_tenant_that_owes_has_no_balance(acme):
    use(acme, NOVEMBER, (price("3"), 10**6))
    do_set_prepaid(acme, is_prepaid=True)
    pay(250, as_credit=True)
    assert limit() == 0  # $2.00 of credit, $3.00 of usage
    pay(250, "p2", as_credit=True)
    assert limit() == 100


def test_commitments_count_before_their_month_is_drafted(acme):
    """$100 of credit, a fee of $60 and $10 of included usage allow usage of $50, before and after the draft."""
    month = period(NOVEMBER)
    do_set_prepaid(acme, is_prepaid=True)
    do_commit(acme, "Trial", fee=0, included_nano=1_000 * CENT, first_month=month.label, last_month=month.label)
    assert limit() == 1_000
    pay(12_500, as_credit=True)
    do_commit(acme, "Support", fee=6_000, included_nano=CENT, first_month=month.label)
    assert limit() == 5_001
    assert unscoped(BillingProfile).get(tenant=acme).balance_changes_at == month.ends_at
    do_draft(month, acme)
    assert limit() == 5_001
    with booking(acme.pk) as locked:  # in the next month, its fee is due as well, and its usage is included
        profile = BillingProfile.objects.for_tenant(acme).select_related("entity").get()
        assert available_nano(locked, profile, month.ends_at) == -2_000 * CENT + CENT
    do_close_period(month, now=over(month))
    (draft,) = do_draft(month, acme)
    do_finalize(draft, now=over(month))  # credit pays the fee
    with booking(acme.pk) as locked:
        assert available_nano(locked, profile, month.ends_at) == -2_000 * CENT + CENT


def tenant_state(tenant: Tenant) -> str:
    return unscoped(Tenant).get(pk=tenant.pk).status


def test_dunning_suspends_and_a_payment_restores(acme):
    invoice = bill(acme, "4")
    days = {number: invoice_day(invoice.due_on, number) for number in (13, 14, 20)}
    assert suspend_overdue(days[20]) == 0  # never, until the entity has a time
    with all_tenants_scope(BypassReason.BILLING):
        BillingEntity.objects.update(suspend_after_days=14)
    assert (suspend_overdue(days[13]), tenant_state(acme)) == (0, "active")
    assert (suspend_overdue(days[14]), suspend_overdue(days[14]), tenant_state(acme)) == (1, 0, "suspended")
    emails.send_all()
    assert mail.outbox[-1].subject.startswith("Account suspended: Invoice")
    assert "Access is then restored" in mail.outbox[-1].body
    pay(499, invoice=invoice.number)
    assert tenant_state(acme) == "suspended"
    pay(1, "p2", invoice=invoice.number)
    assert tenant_state(acme) == "active"
    # A refund makes it overdue again, and the tenant is suspended again.
    pay(-1, "r1", invoice=invoice.number)
    assert (suspend_overdue(days[20]), tenant_state(acme)) == (1, "suspended")
    notices = unscoped(InvoiceEmail).filter(email_type="suspension")
    assert sorted((row.invoice_id, row.number) for row in notices) == [(invoice.pk, 1), (invoice.pk, 2)]


@pytest.mark.parametrize("is_resumed", [False, True])
def test_each_invoice_that_keeps_a_tenant_suspended_has_an_email(acme, is_resumed):
    first = bill(acme, "4", OCTOBER)
    change_entity(suspend_after_days=1)
    assert suspend_overdue(invoice_day(first.due_on, 1)) == 1
    second = bill(acme, "5", NOVEMBER)
    if is_resumed:  # by an operator, in spite of the debt
        do_resume_tenant(acme)
    late = invoice_day(max(first.due_on, second.due_on), 1)
    assert (suspend_overdue(late), suspend_overdue(late)) == (0, 0)
    notices = unscoped(InvoiceEmail).filter(email_type="suspension")
    expected = [first.pk] if is_resumed else [first.pk, second.pk]
    assert sorted((row.invoice_id, row.number) for row in notices) == [(pk, 1) for pk in expected]
    pay(first.total, invoice=first.number)
    emails.send_all()
    sent = [message.subject for message in mail.outbox if message.subject.startswith("Account suspended")]
    assert [str(second.number) in subject for subject in sent] == ([] if is_resumed else [True])


def invoice_day(due_on: object, days: int) -> datetime:
    return datetime.combine(due_on, datetime.min.time(), UTC) + timedelta(days=days)


def test_a_payment_restores_only_what_dunning_suspended(acme):
    invoice = bill(acme, "4")
    late = invoice_day(invoice.due_on, 1)
    change_entity(suspend_after_days=1)
    do_suspend_tenant(acme)  # by an operator
    assert suspend_overdue(late) == 0
    pay(500, invoice=invoice.number)
    assert tenant_state(acme) == "suspended"
    do_resume_tenant(acme)
    pay(-500, "r1", invoice=invoice.number)
    assert (suspend_overdue(late), tenant_state(acme)) == (1, "suspended")
    do_resume_tenant(acme)  # an operator resumes it in spite of the debt
    assert (suspend_overdue(late), tenant_state(acme)) == (0, "active")


def test_dunning_leaves_a_tenant_that_an_operator_suspends_meanwhile(acme):
    """The operator suspends it after dunning has read the overdue invoices. A payment then does not resume it."""
    invoice = bill(acme, "4")
    change_entity(suspend_after_days=1)
    do_suspend_tenant(acme)
    assert not dunning._suspend(acme.pk, invoice_day(invoice.due_on, 1))
    pay(500, invoice=invoice.number)
    assert tenant_state(acme) == "suspended"


def test_dunning_does_not_suspend_a_deleted_tenant(acme):
    invoice = bill(acme, "4")
    change_entity(suspend_after_days=1)
    do_delete_tenant(acme)
    assert (suspend_overdue(invoice_day(invoice.due_on, 1)), tenant_state(acme)) == (0, "active")


@pytest.mark.parametrize(
    ("time_zone", "midnight"), [("America/Los_Angeles", 8), ("UTC", 0), ("Asia/Tokyo", -9), ("Asia/Kolkata", -5.5)]
)
def test_an_invoice_is_overdue_by_the_clocks_of_its_entity(acme, time_zone, midnight):
    """In Los Angeles, the day on which an invoice is due lasts until 08:00 UTC of the next day."""
    invoice = bill(acme, "4")
    change_entity(time_zone=time_zone, suspend_after_days=1)
    late = invoice_day(invoice.due_on, 1) + timedelta(hours=midnight)
    last = late - timedelta(seconds=1)
    assert (emails.remind(last), suspend_overdue(last), past_due(last)) == (0, 0, 0)
    assert (emails.remind(late), suspend_overdue(late), past_due(late)) == (1, 1, 1)


def past_due(now: datetime) -> int:
    """Return the number of invoices past due on the invoices page, which must agree with the state of each."""
    with all_tenants_scope(BypassReason.BILLING):
        invoices = Invoice.objects.all_tenants().select_related("entity")
        found = open_balances(LedgerEntry.objects.all_tenants(), invoices, now).past_due
        labels = [str(state_of(row, today_of(row, now), Money(0)).label) for row in invoices]
    assert labels.count("Past due") == found
    return found


def test_reminders_count_the_days_since_the_due_date(acme):
    """They are numbered by the days past due: 1, 8 and 15, each at the first minute of its day, and once."""
    invoice = bill(acme, "4")
    change_entity(time_zone="Asia/Tokyo")
    midnight = invoice_day(invoice.due_on, 0) - timedelta(hours=9)
    for days, number in ((1, 1), (8, 2), (15, 3)):
        start = midnight + timedelta(days=days)
        assert emails.remind(start - timedelta(seconds=1)) == 0
        assert (emails.remind(start), emails.remind(start + timedelta(hours=23))) == (1, 0)
        reminders = unscoped(InvoiceEmail).filter(email_type="reminder")
        assert sorted(row.number for row in reminders) == list(range(1, number + 1))


def test_the_terms_start_on_the_day_of_issue_by_the_clocks_of_the_entity(acme):
    """An invoice of 14 days that is issued at 20:00 UTC is issued on the next day in Tokyo."""
    use(acme, NOVEMBER, (price("4"), 10**6))
    do_close_period(period(NOVEMBER), now=over(period(NOVEMBER)))
    (draft,) = do_draft(period(NOVEMBER), acme)
    change_entity(time_zone="Asia/Tokyo", terms_days=14)
    assert do_finalize(draft, now=datetime(2026, 12, 3, 20, tzinfo=UTC)).due_on == date(2026, 12, 18)


@pytest.mark.parametrize("days", [0, 1, 30])
def test_a_tenant_is_suspended_on_the_day_of_its_entity(acme, days):
    invoice = bill(acme, "4")
    change_entity(suspend_after_days=days)
    start = invoice_day(invoice.due_on, days)
    assert [suspend_overdue(start - timedelta(seconds=1)), suspend_overdue(start)] == [0, 1]


def test_the_balance_of_a_prepaid_tenant_pays_metered_usage_and_one_off_lines(acme):
    do_set_prepaid(acme, is_prepaid=True)
    pay(12_500, as_credit=True)
    csv = "model,tier,component,usd_per_million\nbox,standard,machine_hours,1000000\n"
    start = datetime(2026, 9, 1, tzinfo=UTC)
    do_publish_prices(do_propose_prices(read_csv(csv.splitlines()), effective_from=start), by=None)
    until = NOVEMBER + timedelta(hours=30)
    do_record_metered_usage(acme, Component.MACHINE_HOURS, "box", 1, NOVEMBER, until, reference="m1")
    assert limit() == 7_000
    do_add_one_off_line(acme, month="2026-11", description="Setup", cents=2_000)
    assert limit() == 5_000
    invoiced(acme, NOVEMBER)
    assert limit() == 5_000


PROMOTIONAL = CreditGrant.GrantType.PROMOTIONAL


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[datetime], int]:
    """Return a function that follows the credits at a time, and returns the number of updated gates."""

    def follow(now: datetime) -> int:
        monkeypatch.setattr("billing.invoicing.prepayment.datetime", SimpleNamespace(now=lambda zone: now))
        return do_follow_credits(now)

    return follow


def test_credit_counts_from_its_start(acme, at):
    do_set_prepaid(acme, is_prepaid=True)
    start = NOVEMBER + timedelta(days=2)
    do_grant_credit(acme, PROMOTIONAL, 1_000 * CENT, starts_at=start)
    do_grant_credit(acme, PROMOTIONAL, 500 * CENT, starts_at=start + timedelta(days=1))
    assert (limit(), at(start - timedelta(seconds=1)), limit()) == (0, 0, 0)
    assert [(at(start + timedelta(seconds=seconds)), limit()) for seconds in (0, 60)] == [(1, 1_000), (0, 1_000)]
    spend(acme, "4")
    assert (at(start + timedelta(days=3)), at(start + timedelta(days=4)), limit()) == (1, 0, 1_100)


def test_expired_credit_counts_for_the_usage_that_it_still_pays(acme, at):
    do_set_prepaid(acme, is_prepaid=True)
    end = NOVEMBER + timedelta(days=3)
    do_grant_credit(acme, PROMOTIONAL, 1_000 * CENT, expires_at=end)
    pay(500, as_credit=True)  # 400 before the tax of 25 %
    spend(acme, "4")
    assert (at(end - timedelta(seconds=1)), limit()) == (0, 1_000)
    assert (at(end), at(end), limit()) == (1, 0, 400)
    invoice = invoiced(acme, NOVEMBER)
    assert (invoice.total, limit()) == (0, 400)


def test_expired_prepaid_credit_pays_usage_with_tax(acme, at):
    do_set_prepaid(acme, is_prepaid=True)
    change_entity(voucher_type=MULTI)
    end = NOVEMBER + timedelta(days=3)
    pay(1_000)
    do_sell_credit(acme, 1_000 * CENT, expires_at=end)
    spend(acme, "4")  # 500 with tax
    assert (limit(), at(end), limit()) == (400, 1, 0)
    pay(250, "p2", as_credit=True)
    assert limit() == 200
    invoice = invoiced(acme, NOVEMBER)
    assert (invoice.total - invoice.prepaid, limit()) == (0, 200)


def test_expired_prepaid_credit_pays_no_more_than_its_amount_before_tax(acme, at):
    do_set_prepaid(acme, is_prepaid=True)
    change_entity(voucher_type=MULTI)
    end = NOVEMBER + timedelta(days=3)
    pay(1_000)
    do_sell_credit(acme, 1_000 * CENT, expires_at=end)
    spend(acme, "9")  # 11.25 with tax
    at(end)
    pay(250, "p2", as_credit=True)
    assert limit() == 100  # 2.00 before tax, of which 1.00 pay the rest of the usage
    invoice = invoiced(acme, NOVEMBER)
    assert (invoice.total - invoice.prepaid, limit()) == (0, 100)


def test_credit_is_applied_as_on_the_invoice_before_it_expires(acme, at):
    """The credit without an end is applied first, so nothing is left that expired credit could pay."""
    do_set_prepaid(acme, is_prepaid=True)
    end = NOVEMBER + timedelta(days=3)
    do_grant_credit(acme, PROMOTIONAL, 1_000 * CENT, expires_at=end)
    do_grant_credit(acme, PROMOTIONAL, 1_000 * CENT, priority=50)
    spend(acme, "8")
    assert (at(end), limit()) == (1, 200)
    invoiced(acme, NOVEMBER)
    assert limit() == 200


def test_credit_that_is_not_used_up_in_its_month_does_not_pay_the_next_one(acme, at):
    do_set_prepaid(acme, is_prepaid=True)
    end = datetime(2026, 12, 1, tzinfo=UTC)
    do_grant_credit(acme, PROMOTIONAL, 1_000 * CENT, expires_at=end)
    spend(acme, "4")
    use(acme, end + timedelta(hours=1), (price("3", model="late", number=11), 10**6))
    assert (at(end), limit()) == (1, -300)
    pay(1_250, as_credit=True)
    assert limit() == 700  # $10.00, less $3.00 of December


def test_a_one_off_line_counts_from_its_month_on(acme, monkeypatch):
    """The month begins by the clocks of the billing entity."""
    change_entity(time_zone="America/Los_Angeles")
    do_set_prepaid(acme, is_prepaid=True)
    pay(12_500, as_credit=True)
    whole = limit()
    do_add_one_off_line(acme, month="2027-01", description="Next year", cents=2_000)
    assert limit() == whole
    for day, hour, counted in ((31, 23, 0), (32, 7, 0), (32, 8, 2_000)):
        now = datetime(2026, 12, 1, hour, 30, tzinfo=UTC) + timedelta(days=day - 1)
        monkeypatch.setattr("billing.invoicing.prepayment.datetime", SimpleNamespace(now=lambda zone, now=now: now))
        do_count_due_lines(now)
        assert limit() == whole - counted
