"""Re-ratings: corrected prices of invoiced usage, as credit and debit notes in the ledger."""

from __future__ import annotations

from datetime import UTC, date, datetime

import pytest

from billing.invoicing import checks, reratings
from billing.invoicing.corrections import do_issue_credit_note, do_issue_debit_note, do_void
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.one_off_lines import do_add_one_off_line, do_remove_one_off_line
from billing.invoicing.reratings import continue_reratings, do_apply_rerating, do_propose_rerating, preview_rerating
from billing.ledger.credits import do_grant_credit
from billing.ledger.ledger import balance
from billing.ledger.matching import sum_outstanding
from billing.models import Account, CreditGrant, Invoice, LedgerEntry, Rerating, TaxRule, UsageEvent
from billing.payments.recording import Received, do_record_payment
from billing.periods import default_entity
from billing.rates.price_book import NewPrice, Proposal
from billing.rates.pricing import Component, Tier
from tenants.actions import ActionRefused, Conflict, do_create_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant, User
from tests.support.billing.books import (
    DECEMBER,
    NOVEMBER,
    OCTOBER,
    dollars,
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
START, END = datetime(2026, 10, 1, tzinfo=UTC), datetime(2026, 11, 1, tzinfo=UTC)


def corrected(amount: str, component: str = "uncached", model: str = "alpha", **ranges) -> NewPrice:
    return NewPrice(model, Tier.STANDARD, Component(component), dollars(amount), **ranges)


def propose(*prices: NewPrice, **fields) -> Rerating:
    return do_propose_rerating(Proposal(prices), START, END, reason="Wrong price", **fields)


def apply(*prices: NewPrice) -> list[Invoice]:
    """Apply a re-rating and return its notes."""
    row = do_apply_rerating(propose(*prices), by=None)
    report = continue_reratings()
    assert report.left == []
    notes = unscoped(Invoice).filter(rerated__rerating=row)
    assert {str(note.number) for note in notes} <= set(report.issued)
    return sorted(notes, key=lambda note: note.pk)


def on(account: Account, tenant: Tenant) -> int:
    with all_tenants_scope(BypassReason.BILLING):
        cents, rest = divmod(balance(tenant.pk, account), CENT)
    assert rest == 0
    return cents


def owed(invoice: Invoice) -> int:
    with all_tenants_scope(BypassReason.BILLING):
        return sum_outstanding(invoice)


def assert_recomputed(*invoices: Invoice) -> None:
    """Check that documents, PDFs and ledger are what recomputation gives."""
    for invoice in invoices:
        with all_tenants_scope(BypassReason.BILLING):
            rows = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to__period")
            result = checks.check(rows.get(pk=invoice.pk))
        assert (result.ledger_difference, result.same_data, result.same_pdf) == (0, True, True), invoice
    assert sum(entry.nano for entry in unscoped(LedgerEntry).all()) == 0


def tax(percent: int) -> None:
    with all_tenants_scope(BypassReason.BILLING):
        TaxRule.objects.create(
            entity=default_entity(), category="S", rate_ppm=percent * 10_000, starts_on=date(2026, 1, 1)
        )


def test_each_invoice_gets_a_credit_or_debit_note_with_its_tax(acme):
    """Prompts below 1,000 tokens were too expensive and output too cheap; usage outside the range does not change."""
    tax(10)
    globex = do_create_tenant("globex", "Globex")
    input_price, output_price = price("10"), price("1", "output")
    use(acme, OCTOBER, (input_price, 900), times=1000)
    use(acme, OCTOBER, (input_price, MILLION))  # a long prompt
    use(acme, OCTOBER, (input_price, 10), (output_price, 10))
    use(globex, OCTOBER, (input_price, 100), (output_price, MILLION))
    first, second = invoiced(acme, OCTOBER), invoiced(globex, OCTOBER)
    assert (first.subtotal, second.subtotal) == (1900, 100)
    draft = propose(corrected("6", until_tokens=1000), corrected("4", "output"))
    shown = preview_rerating(draft)
    assert [(row.tenant.slug, row.subtotal, row.total, row.note) for row in shown] == [
        *(("acme", -360, -396, None), ("globex", 300, 330, None)),
    ]
    do_apply_rerating(draft, by=None)
    assert len(continue_reratings().issued) == 2
    assert continue_reratings().issued == []
    credit, debit = sorted(unscoped(Invoice).filter(rerated__rerating=draft), key=lambda row: row.tenant_id)
    assert [(row.invoice_type, row.refers_to_id, row.subtotal, row.total) for row in (credit, debit)] == [
        *(("credit_note", first.pk, 360, 396), ("debit_note", second.pk, 300, 330)),
    ]
    assert (owed(first), owed(second), owed(debit)) == (2090 - 396, 110, 330)
    assert (on(Account.REVENUE, acme), on(Account.TAX, acme)) == (-1540, -154)
    assert (on(Account.REVENUE, globex), on(Account.TAX, globex)) == (-400, -40)
    assert_recomputed(first, second, credit, debit)
    after = preview_rerating(draft)
    assert [(row.subtotal, row.total, row.note) for row in after] == [(-360, -396, credit), (300, 330, debit)]
    do_record_payment(Received("manual", "p1", 440, NOVEMBER, tenant="globex"))
    assert (owed(second), owed(debit)) == (0, 0)
    with pytest.raises(Conflict, match="Only open invoices"):
        do_void(second, "It has a debit note")


def test_an_interrupted_re_rating_continues_without_a_second_note(acme, monkeypatch):
    globex = do_create_tenant("globex", "Globex")
    old = price("10")
    for tenant in (acme, globex):
        use(tenant, OCTOBER, (old, MILLION))
    for tenant in (acme, globex):
        invoiced(tenant, OCTOBER)
    do_apply_rerating(propose(corrected("6")), by=None)
    finalize = do_finalize

    def interrupt(note: Invoice) -> Invoice:
        made = finalize(note)
        if made.tenant_id == globex.pk:
            raise RuntimeError("killed")
        return made

    with monkeypatch.context() as patch:
        patch.setattr(reratings, "do_finalize", interrupt)
        report = continue_reratings()
    assert (len(report.issued), len(report.left)) == (1, 1)
    assert len(continue_reratings().issued) == 1
    year = datetime.now(UTC).year
    assert [(row.tenant_id, row.number) for row in unscoped(Invoice).filter(invoice_type="credit_note")] == [
        *((acme.pk, f"CN-{year}-000001"), (globex.pk, f"CN-{year}-000002")),
    ]
    assert on(Account.REVENUE, acme) == on(Account.REVENUE, globex) == -600


def test_only_prices_of_the_book_or_tenant_are_corrected(acme):
    """A tenant's own price does not change with the list's, and the reverse."""
    listed, own = price("10"), price("8", tenant_id=acme.pk, tier="batch")
    use(acme, OCTOBER, (listed, MILLION))
    use(acme, OCTOBER, (own, MILLION))
    invoiced(acme, OCTOBER)
    batch = NewPrice("alpha", Tier.BATCH, Component.UNCACHED, dollars("1"))
    assert preview_rerating(propose(batch)) == []
    (row,) = preview_rerating(propose(batch, tenant=acme))
    assert row.subtotal == -700
    (row,) = preview_rerating(propose(batch, corrected("9")))
    assert row.subtotal == -100


def test_usage_that_is_invoiced_later_is_corrected_after_its_invoice(acme):
    old = price("10")
    use(acme, OCTOBER, (old, MILLION))
    invoiced(acme, OCTOBER)
    assert len(apply(corrected("6"))) == 1
    use(acme, OCTOBER, (old, MILLION))  # settled after October was closed
    use(acme, NOVEMBER, (price("3", model="now"), MILLION))
    november = invoiced(acme, NOVEMBER)
    (number,) = continue_reratings().issued
    (note,) = unscoped(Invoice).filter(number=number)
    assert (note.refers_to_id, note.subtotal, owed(november)) == (november.pk, 400, 900)
    assert_recomputed(november, note)


def test_later_re_ratings_replace_the_price_of_earlier_ones(acme):
    """The second credit exceeds the invoice: its rest is credited on the debit note. Each one is byte-equal."""
    tax(10)
    use(acme, OCTOBER, (price("10"), MILLION))
    invoice = invoiced(acme, OCTOBER)
    (debit,) = apply(corrected("15"))
    assert (debit.invoice_type, debit.total) == ("debit_note", 550)
    (credit,) = apply(corrected("2"))
    (other,) = unscoped(Invoice).filter(refers_to=debit)
    assert (credit.subtotal, credit.refers_to_id, other.subtotal, other.total) == (1000, invoice.pk, 300, 330)
    assert (on(Account.REVENUE, acme), on(Account.TAX, acme), on(Account.RECEIVABLE, acme)) == (-200, -20, 220)
    (last,) = apply(corrected("3"))
    assert (last.invoice_type, last.subtotal) == ("debit_note", 100)
    assert_recomputed(invoice, debit, credit, other, last)


def test_usage_reversed_after_a_re_rating_is_credited_at_the_corrected_price(acme):
    old = price("10")
    use(acme, OCTOBER, (old, MILLION), times=2)
    october = invoiced(acme, OCTOBER)
    one, other = unscoped(UsageEvent).all()
    take_back(one, NOVEMBER)
    do_close_period(period(NOVEMBER), now=over(period(NOVEMBER)))
    (credit,) = apply(corrected("6"))  # November's correction is not issued yet
    (early,) = [do_finalize(row) for row in do_draft(period(NOVEMBER), acme)]
    assert (credit.subtotal, early.subtotal) == (400, 1000)
    take_back(other, DECEMBER)
    do_close_period(period(DECEMBER), now=over(period(DECEMBER)))
    (late,) = [do_finalize(row) for row in do_draft(period(DECEMBER), acme)]
    assert (late.invoice_type, late.subtotal) == ("correction", 600)
    assert (on(Account.REVENUE, acme), on(Account.RECEIVABLE, acme)) == (0, 0)
    assert_recomputed(october, credit, early, late)


def test_searches_are_re_rated_like_tokens(acme):
    """Of five searches at $1.00 each, two are reversed before the re-rating to $0.40, and one after it."""
    old = price("1000000", "searches")
    for searches in (2, 2, 1):
        use(acme, OCTOBER, (old, searches))
    october = invoiced(acme, OCTOBER)
    first, _, last = sorted(unscoped(UsageEvent).all(), key=lambda row: -row.searches)
    take_back(first, NOVEMBER)
    do_close_period(period(NOVEMBER), now=over(period(NOVEMBER)))
    (correction,) = [do_finalize(row) for row in do_draft(period(NOVEMBER), acme)]
    (credit,) = apply(corrected("400000", "searches"))
    assert (october.subtotal, correction.subtotal, credit.subtotal) == (500, 200, 180)
    take_back(last, DECEMBER)
    do_close_period(period(DECEMBER), now=over(period(DECEMBER)))
    (late,) = [do_finalize(row) for row in do_draft(period(DECEMBER), acme)]
    assert (late.subtotal, on(Account.REVENUE, acme)) == (40, -80)
    assert_recomputed(october, correction, credit, late)


def test_less_than_a_cent_is_carried_to_the_next_invoice(acme):
    olds = [price("1", model=f"m{number}") for number in range(4)]
    for old in olds:
        use(acme, OCTOBER, (old, MILLION))
    invoiced(acme, OCTOBER)
    assert apply(*(corrected("1.004", model=f"m{number}") for number in range(4))) == []
    assert continue_reratings().issued == []
    use(acme, NOVEMBER, (price("1", model="n"), MILLION))
    assert invoiced(acme, NOVEMBER).subtotal == 101  # 1.6 cents are due


def test_a_second_person_applies_and_the_prices_never_change(acme):
    price("10")
    author, other = (User.objects.create_superuser(f"{name}@op.example") for name in ("one", "two"))
    row = propose(corrected("6"), created_by=author)
    with pytest.raises(ActionRefused, match="someone other"):
        do_apply_rerating(row, by=author)
    do_apply_rerating(row, by=other)
    with pytest.raises(Conflict, match="already applied"):
        do_apply_rerating(row, by=other)
    with pytest.raises(Conflict, match="already applied"):
        reratings.do_discard_rerating(row, by=other)
    for wrong in ({"book": "unknown"}, {"book": "other", "tenant": acme}):
        with pytest.raises(ActionRefused, match="book"):
            propose(corrected("6"), **wrong)
    with pytest.raises(ActionRefused, match="ends_at"):
        do_propose_rerating(Proposal((corrected("6"),)), END, START, reason="x")


def test_one_off_lines_are_billed_once_on_the_next_invoice(acme):
    """A line for a final month is billed with the next one; a void makes its lines due again.

    Promotional credit does not pay them.
    """
    globex = do_create_tenant("globex", "Globex")
    setup = do_add_one_off_line(acme, month="2026-10", description="Setup", cents=500)
    do_add_one_off_line(globex, month="2026-11", description="Training", cents=700)
    do_grant_credit(acme, CreditGrant.GrantType.PROMOTIONAL, 900 * CENT, starts_at=OCTOBER)
    use(acme, OCTOBER, (price("10"), MILLION))
    october = invoiced(acme, OCTOBER)
    assert (october.subtotal, october.total) == (1500, 600)
    with pytest.raises(Conflict, match=str(october.number)):
        do_remove_one_off_line(setup)
    late = do_add_one_off_line(acme, month="2026-10", description="Late", cents=30)
    do_remove_one_off_line(do_add_one_off_line(acme, month="2026-10", description="Removed", cents=1))
    do_void(october, "Wrong address")
    (again,) = [row for row in do_draft(period(OCTOBER), acme) if row.state == "draft"]
    do_remove_one_off_line(late)
    do_add_one_off_line(acme, month="2026-10", description="After the draft", cents=40)
    again = do_finalize(again)
    assert (again.subtotal, again.revision) == (1540, 2)
    do_close_period(period(NOVEMBER), now=over(period(NOVEMBER)))
    (only,) = do_draft(period(NOVEMBER))
    november = do_finalize(only)
    assert (november.tenant_id, november.subtotal) == (globex.pk, 700)
    assert_recomputed(again, november)


def test_a_debit_note_and_one_off_amounts(acme):
    tax(10)
    use(acme, OCTOBER, (price("10"), MILLION))
    invoice = invoiced(acme, OCTOBER)
    debit = do_issue_debit_note(invoice, [("Support hours", 500)], "Forgotten")
    assert (debit.invoice_type, debit.total, debit.due_on is not None) == ("debit_note", 550, True)
    with pytest.raises(Conflict, match="final invoices"):
        do_issue_debit_note(debit, [("Again", 1)], "x")
    do_record_payment(Received("manual", "p1", 1650, NOVEMBER, tenant="acme"))
    note = do_issue_credit_note(debit, [("Support hours", 200)], "Too many")
    assert (note.total, owed(debit), on(Account.DEPOSITS, acme)) == (220, 0, -220)
    assert_recomputed(invoice, debit, note)


def test_a_debit_note_does_not_use_up_one_off_lines(acme):
    """The lines of a debit note have the type of one-off lines, and are none."""
    use(acme, OCTOBER, (price("10"), MILLION))
    invoice = invoiced(acme, OCTOBER)
    do_add_one_off_line(acme, month="2026-10", description="Setup", cents=700)
    do_issue_debit_note(invoice, [("Support hours", 500)], "Forgotten")
    use(acme, NOVEMBER, (price("1", model="n", number=2), MILLION))
    assert invoiced(acme, NOVEMBER).subtotal == 800


def test_a_debit_note_of_a_rerating_cannot_be_voided(acme):
    """Later re-ratings start from its prices, so they would return what no one paid."""
    use(acme, OCTOBER, (price("10"), MILLION))
    invoiced(acme, OCTOBER)
    (debit,) = apply(corrected("15"))
    with pytest.raises(Conflict, match="re-rating"):
        do_void(debit, "wrong")
    (note,) = apply(corrected("10"))
    assert (debit.total, note.total) == (500, 500)
    assert (on(Account.REVENUE, acme), on(Account.RECEIVABLE, acme), on(Account.DEPOSITS, acme)) == (-1_000, 1_000, 0)


def test_a_carried_re_rating_of_a_voided_invoice_does_not_count(acme):
    """The next revision is re-rated again."""
    olds = [price("1", model=f"m{number}") for number in range(4)]
    for old in olds:
        use(acme, OCTOBER, (old, MILLION))
    october = invoiced(acme, OCTOBER)
    assert apply(*(corrected("1.004", model=f"m{number}") for number in range(4))) == []
    do_void(october, "Wrong address")
    (again,) = [row for row in do_draft(period(OCTOBER), acme) if row.state == "draft"]
    do_finalize(again)
    assert continue_reratings().left == []
    use(acme, NOVEMBER, (price("1", model="n"), MILLION))
    assert invoiced(acme, NOVEMBER).subtotal == 101  # 1.6 cents are due, not 3.2
