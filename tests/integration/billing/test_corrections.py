"""Corrections of invoiced usage, credit notes, voids, write-offs and refunds: which invoice, and who receives money."""

from __future__ import annotations

from datetime import date, timedelta

import pytest

from billing.invoicing import checks
from billing.invoicing.corrections import do_issue_credit_note, do_issue_debit_note, do_void, do_write_off
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.line_sources import MonthDraft, TermCharges
from billing.invoicing.purchases import do_sell_credit
from billing.invoicing.runs import invoice_months
from billing.invoicing.setup import do_set_profile
from billing.ledger import credits
from billing.ledger.ledger import balance
from billing.ledger.matching import sum_outstanding
from billing.models import Account, CreditGrant, Invoice, LedgerEntry, Payment, TaxRule, UsageEvent
from billing.payments.recording import Received, do_record_payment
from billing.periods import default_entity
from tenants.actions import Conflict, do_create_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tests.support.billing.books import (
    DECEMBER,
    NOVEMBER,
    OCTOBER,
    invoiced,
    over,
    period,
    price,
    take_back,
    use,
)
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MILLION = 10**6
CENT = 10**7  # nano-USD


def pay(cents: int, reference: str = "p1", **fields) -> Payment:
    return do_record_payment(Received("manual", reference, cents, NOVEMBER, tenant="acme", **fields))[0]


def on(account: Account, tenant: Tenant) -> int:
    """Return the balance of an account in cents, which is whole."""
    with all_tenants_scope(BypassReason.BILLING):
        cents, rest = divmod(balance(tenant.pk, account), CENT)
    assert rest == 0
    return cents


def state(invoice: Invoice) -> tuple[str, int]:
    with all_tenants_scope(BypassReason.BILLING):
        row = Invoice.objects.all_tenants().get(pk=invoice.pk)
        return row.state, sum_outstanding(row)


def corrections(tenant: Tenant, at) -> list[Invoice]:
    """Close the month and finalize the corrections of the tenant."""
    month = period(at)
    do_close_period(month, now=over(month))
    drafts = [row for row in do_draft(month, tenant) if row.invoice_type == Invoice.InvoiceType.CORRECTION]
    return [do_finalize(draft, now=month.ends_at) for draft in drafts]


def tax(percent: int, since: date) -> None:
    with all_tenants_scope(BypassReason.BILLING):
        TaxRule.objects.create(entity=default_entity(), category="S", rate_ppm=percent * 10_000, starts_on=since)


def events(tenant: Tenant, model: str) -> list[UsageEvent]:
    return [row for row in unscoped(UsageEvent).all() if row.model == model]


def test_a_correction_for_each_corrected_invoice_with_its_tax(acme):
    """October's usage that November billed is credited on November's invoice."""
    tax(10, date(2026, 1, 1))
    tax(20, date(2026, 11, 1))
    early, late = price("1", model="early"), price("4", model="late")
    use(acme, OCTOBER, (early, MILLION))
    october = invoiced(acme, OCTOBER)
    use(acme, OCTOBER, (late, MILLION))  # settled after October was closed
    use(acme, NOVEMBER, (price("2", model="now"), MILLION))
    november = invoiced(acme, NOVEMBER)
    assert (october.total, november.total) == (110, 720)
    for model in ("early", "late", "now"):
        (event,) = events(acme, model)
        take_back(event, DECEMBER)
    notes = corrections(acme, DECEMBER)
    assert [(note.refers_to_id, note.subtotal, note.total) for note in notes] == [
        *((october.pk, 100, 110), (november.pk, 600, 720)),
    ]
    assert [state(row) for row in (october, november)] == [("paid", 0), ("paid", 0)]
    assert on(Account.REVENUE, acme) == on(Account.TAX, acme) == on(Account.DEPOSITS, acme) == 0
    assert corrections(acme, DECEMBER) == []  # a second run drafts nothing
    for note in notes:
        with all_tenants_scope(BypassReason.BILLING):
            rows = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to__period")
            result = checks.check(rows.get(pk=note.pk))
        assert (result.ledger_difference, result.same_data, result.same_pdf) == (0, True, True)


def test_usage_of_a_voided_invoice_is_not_credited(acme):
    use(acme, OCTOBER, (price("1"), MILLION))
    do_void(invoiced(acme, OCTOBER), "wrong address")
    take_back(unscoped(UsageEvent).all()[0], NOVEMBER)
    assert corrections(acme, NOVEMBER) == []
    assert on(Account.CREDITS, acme) == on(Account.DEPOSITS, acme) == 0


def test_a_correction_of_a_written_off_invoice_reduces_the_loss(acme):
    """Only the paid part becomes a deposit, which pays the open invoice."""
    use(acme, OCTOBER, (price("1"), MILLION), times=4)
    october = invoiced(acme, OCTOBER)
    pay(100)
    do_write_off(october, "insolvent")
    use(acme, NOVEMBER, (price("2", model="b"), MILLION))
    november = invoiced(acme, NOVEMBER)
    for event in events(acme, "alpha"):
        take_back(event, DECEMBER)
    corrections(acme, DECEMBER)
    assert (on(Account.BAD_DEBT, acme), on(Account.DEPOSITS, acme)) == (0, 0)
    assert (state(october), state(november)) == (("paid", 0), ("open", 100))


def test_an_invoice_that_credit_paid_can_be_credited_and_returns_the_credit(acme):
    pay(300)
    do_sell_credit(acme, 300 * CENT, starts_at=OCTOBER)
    credits.do_grant_credit(acme, CreditGrant.GrantType.PROMOTIONAL, 100 * CENT, starts_at=OCTOBER, priority=1)
    use(acme, OCTOBER, (price("4"), MILLION))
    invoice = invoiced(acme, OCTOBER)
    assert (invoice.total, invoice.prepaid, state(invoice)) == (300, 300, ("paid", 0))
    for cents, total, deducted in ((50, 50, []), (300, 250, [{"label": "Returned as credit", "cents": 50}])):
        note = do_issue_credit_note(invoice, [("SLA credit", cents)], "SLA")
        assert (note.total, note.credits) == (total, deducted)
    with pytest.raises(Conflict, match=r"Only \$0\.50"):
        do_issue_credit_note(invoice, [("SLA credit", 51)], "SLA")
    returned = unscoped(CreditGrant).all()[2:]
    assert [(grant.grant_type, grant.nano // CENT) for grant in returned] == [
        *(("prepaid", 50), ("prepaid", 250), ("promotional", 50)),
    ]
    assert on(Account.REVENUE, acme) == -50
    assert on(Account.CREDITS, acme) == -350


def test_an_invoice_that_credit_paid_can_be_voided(acme):
    credits.do_grant_credit(acme, CreditGrant.GrantType.PROMOTIONAL, 200 * CENT, starts_at=OCTOBER)
    use(acme, OCTOBER, (price("2"), MILLION))
    invoice = invoiced(acme, OCTOBER)
    do_void(invoice, "wrong address")
    assert state(invoice) == ("void", 0)
    assert on(Account.CREDITS, acme) == -200
    with pytest.raises(Conflict, match="Only open invoices"):
        do_void(invoice, "again")


def test_an_invoice_whose_debit_note_is_void_can_be_voided(acme):
    tax(19, date(2026, 1, 1))
    use(acme, OCTOBER, (price("1"), MILLION))
    invoice = invoiced(acme, OCTOBER)
    debit = do_issue_debit_note(invoice, [("Setup", 100)], "forgotten")
    with pytest.raises(Conflict, match="Only open invoices"):
        do_void(invoice, "wrong address")
    do_void(debit, "wrong address")
    do_void(invoice, "wrong address")
    assert (state(debit), state(invoice)) == (("void", 0), ("void", 0))
    assert [on(account, acme) for account in (Account.REVENUE, Account.TAX, Account.RECEIVABLE)] == [0, 0, 0]


def test_credit_that_a_void_restores_after_it_expired_expires_again(acme):
    credits.do_grant_credit(
        acme, CreditGrant.GrantType.PROMOTIONAL, 150 * CENT, starts_at=OCTOBER, expires_at=OCTOBER + timedelta(days=1)
    )
    use(acme, OCTOBER, (price("1"), MILLION))
    october = invoiced(acme, OCTOBER)
    assert credits.do_expire_credits(DECEMBER) == 1
    do_void(october, "wrong address")
    assert on(Account.CREDITS, acme) == -100
    assert credits.do_expire_credits(DECEMBER) == 1
    assert credits.do_expire_credits(DECEMBER) == 0
    assert on(Account.CREDITS, acme) == on(Account.PROMOTIONS, acme) == 0


def test_no_more_than_the_invoice_is_credited(acme):
    """A correction after credit notes over the whole amount returns nothing."""
    use(acme, OCTOBER, (price("1"), MILLION))
    october = invoiced(acme, OCTOBER)
    pay(100)
    do_issue_credit_note(october, [("SLA credit", 70)], "SLA")
    take_back(unscoped(UsageEvent).all()[0], NOVEMBER)
    (note,) = corrections(acme, NOVEMBER)
    assert (note.subtotal, note.total, note.credits) == (100, 30, [{"label": "Credited before", "cents": 70}])
    assert on(Account.DEPOSITS, acme) == -100
    assert on(Account.REVENUE, acme) == on(Account.CREDITS, acme) == 0


def test_a_payment_after_a_write_off_pays_the_invoice(acme):
    use(acme, OCTOBER, (price("2"), MILLION))
    invoice = invoiced(acme, OCTOBER)
    do_write_off(invoice, "insolvent")
    pay(50)
    assert (state(invoice), on(Account.BAD_DEBT, acme)) == (("uncollectible", 0), 150)
    pay(-20, "r1")
    assert (state(invoice), on(Account.BAD_DEBT, acme)) == (("uncollectible", 0), 170)
    pay(170, "p2")
    assert (state(invoice), on(Account.BAD_DEBT, acme), on(Account.DEPOSITS, acme)) == (("paid", 0), 0, 0)
    pay(-10, "r2")
    assert state(invoice) == ("open", 10)
    do_write_off(invoice, "again")
    assert on(Account.BAD_DEBT, acme) == 10
    assert sum(entry.nano for entry in unscoped(LedgerEntry).all()) == 0


def test_open_invoices_are_paid_before_written_off_ones(acme):
    use(acme, OCTOBER, (price("2"), MILLION))
    lost = invoiced(acme, OCTOBER)
    do_write_off(lost, "insolvent")
    use(acme, NOVEMBER, (price("3", model="b"), MILLION))
    due = invoiced(acme, NOVEMBER)
    pay(350)
    assert (state(due), state(lost), on(Account.BAD_DEBT, acme)) == (("paid", 0), ("uncollectible", 0), 150)


def test_a_refund_without_a_payment_is_rejected(acme):
    with pytest.raises(Conflict, match="exceeds"):
        pay(-1, "r1")
    pay(100)
    with pytest.raises(Conflict, match=r"\$1\.00"):
        pay(-101, "r1")
    pay(-100, "r1")
    with pytest.raises(Conflict, match="exceeds"):
        pay(-1, "r2")
    assert on(Account.CASH, acme) == 0


@pytest.mark.parametrize("name", ["Bell \a", "{u7}", "Line\x0bbreak", "東京 {x} 7", 'Quote " and \\ \u200b'])
def test_no_name_blocks_an_invoice(acme, name):
    """Names that were stored before they were validated."""
    with all_tenants_scope(BypassReason.COMMAND):
        Tenant.objects.all_tenants().filter(pk=acme.pk).update(name=name)
    use(acme, OCTOBER, (price("1"), MILLION))
    assert invoiced(acme, OCTOBER).number


def test_one_failing_invoice_does_not_stop_the_others(acme):
    other = do_create_tenant("globex", "Globex")
    one = price("1")
    for tenant in (acme, other):
        use(tenant, OCTOBER, (one, MILLION))
    tax(10, date(2026, 1, 1))
    with all_tenants_scope(BypassReason.BILLING):
        TaxRule.objects.update(region="Bavaria")
    do_set_profile(other, region="Bavaria")
    report = invoice_months(month="2026-10", now=over(period(OCTOBER)))
    assert len(report.finalized) == 1
    assert [text.partition(":")[0] for text in report.left] == ["acme 2026-10"]


def test_one_failing_draft_does_not_stop_the_others(acme, monkeypatch):
    other = do_create_tenant("globex", "Globex")
    one = price("1")
    for tenant in (acme, other):
        use(tenant, OCTOBER, (one, MILLION))
    real = TermCharges.lines

    def broken(self: TermCharges, draft: MonthDraft) -> list:
        if draft.invoice.tenant_id == acme.pk:
            raise ValueError("no such term")
        return real(self, draft)

    with monkeypatch.context() as patch:
        patch.setattr(TermCharges, "lines", broken)
        report = invoice_months(now=over(period(OCTOBER)))
    assert (len(report.finalized), report.left) == (1, ["acme 2026-10: no such term"])
    assert period(OCTOBER).invoiced_at is None
    assert len(invoice_months(now=over(period(OCTOBER))).finalized) == 1
    assert period(OCTOBER).invoiced_at is not None


def test_a_month_waits_for_the_draft_that_its_correction_corrects(acme):
    use(acme, OCTOBER, (price("1"), MILLION))
    tax(10, date(2026, 1, 1))
    with all_tenants_scope(BypassReason.BILLING):
        TaxRule.objects.update(region="Bavaria")
    month = period(NOVEMBER)
    assert len(invoice_months(month="2026-10", now=over(period(OCTOBER))).left) == 1  # no tax rule
    take_back(unscoped(UsageEvent).all()[0], NOVEMBER)
    invoice_months(now=over(month))
    with all_tenants_scope(BypassReason.BILLING):
        TaxRule.objects.update(region="")
    invoice_months(now=over(month))
    assert on(Account.REVENUE, acme) == 0
    assert {row.invoice_type: row.total for row in unscoped(Invoice).all()} == {"invoice": 110, "correction": 110}
    assert period(NOVEMBER).invoiced_at is not None


def test_usage_reversed_while_its_invoice_was_void_is_credited_on_the_next_revision(acme):
    """November is invoiced before October is drafted again."""
    use(acme, OCTOBER, (price("1"), MILLION))
    invoice_months(now=over(period(OCTOBER)))
    do_void(unscoped(Invoice).get(), "wrong address")
    take_back(unscoped(UsageEvent).all()[0], NOVEMBER)
    invoice_months(now=over(period(NOVEMBER)))
    assert period(NOVEMBER).invoiced_at is not None
    again = [do_finalize(row) for row in do_draft(period(OCTOBER), acme)]
    assert [(row.revision, row.total) for row in again] == [(2, 100)]
    invoice_months(now=over(period(NOVEMBER)))
    assert on(Account.REVENUE, acme) == on(Account.RECEIVABLE, acme) == 0
    assert period(NOVEMBER).invoiced_at is not None
