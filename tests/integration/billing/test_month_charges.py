"""The charges of a month: one function for drafts, previews, final invoices, notes and checks."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from typing import Any

import pypdf
import pytest

from billing.currencies.amounts import FEMTO_A_CENT, NANO_A_CENT
from billing.invoicing import checks, month_charges, term_lines
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.line_sources import BilledMonth, LineSource, MonthDraft
from billing.invoicing.one_off_lines import do_add_one_off_line
from billing.invoicing.prepayment import available_nano
from billing.invoicing.preview import preview
from billing.invoicing.price_terms import do_add_price_term
from billing.invoicing.reratings import continue_reratings, do_apply_rerating, do_propose_rerating
from billing.ledger import credits
from billing.metering.metered import do_record_metered_usage, do_reverse_metered_usage
from billing.models import BillingProfile, Invoice, InvoiceLine, MeteredUsage, Rerating, UsageEvent
from billing.pricing.prices import do_assign_book, do_propose_prices, do_publish_prices
from billing.rates.price_book import NewPrice, Proposal
from billing.rates.price_files import read_csv
from billing.rates.pricing import Component, Tier
from billing.rates.terms import TermRule, TermType
from tenants.actions import Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tests.support.billing.books import (
    DECEMBER,
    NOVEMBER,
    OCTOBER,
    dollars,
    invoiced,
    over,
    pdf_of,
    period,
    price,
    take_back,
    use,
)
from tests.support.billing.invoice_forms import attached
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MILLION = 10**6


class SupportSource(LineSource):
    """A source that bills support to one tenant each month."""

    line_types = ("support",)

    def __init__(self, tenant: Tenant, *, at_issue: bool) -> None:
        self.tenant, self.at_issue = tenant, at_issue
        self.billed: list[str | None] = []

    def tenants(self, month: BilledMonth) -> Any:
        return [self.tenant.pk]

    def lines(self, draft: MonthDraft) -> list[InvoiceLine]:
        if not draft.is_invoice:
            return []
        values = {"tenant_id": self.tenant.pk, "line_type": "support", "description": "Support hours"}
        return [InvoiceLine(invoice=draft.invoice, femto=7 * 10**15, cents=700, **values)]

    def is_decided_at_issue(self, draft: MonthDraft) -> bool:
        return self.at_issue

    def mark_billed(self, draft: MonthDraft) -> None:
        self.billed.append(draft.invoice.number)


def lines(invoice: Invoice) -> list[tuple[str, str, int]]:
    rows = sorted(unscoped(InvoiceLine).filter(invoice_id=invoice.pk), key=lambda row: row.position)
    assert [row.position for row in rows] == list(range(1, len(rows) + 1))
    return [(row.line_type, row.description, row.cents) for row in rows]


def check(invoice: Invoice) -> checks.InvoiceCheckResult:
    with all_tenants_scope(BypassReason.BILLING):
        rows = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to__period")
        return checks.check(rows.get(pk=invoice.pk))


def assert_recomputed(*invoices: Invoice) -> None:
    for invoice in invoices:
        result = check(invoice)
        differences = (result.ledger_difference, result.month_difference)
        assert (differences, result.same_data, result.same_pdf) == ((0, 0), True, True)


@pytest.mark.parametrize("at_issue", [False, True])
@pytest.mark.parametrize("place", [0, 1, 6])
@pytest.mark.parametrize("has_usage", [False, True])
def test_a_further_source_is_in_every_place(acme, monkeypatch, at_issue, place, has_usage):
    """A draft, a preview, the balance of a prepaid tenant, the final invoice, its check, PDF and XML have the line of a
    source that is added here.
    """
    source = SupportSource(acme, at_issue=at_issue)
    monkeypatch.setattr(month_charges, "SOURCES", list(month_charges.SOURCES))
    month_charges.SOURCES.insert(place, source)
    month = period(OCTOBER)
    if has_usage:
        use(acme, OCTOBER, (price("3"), MILLION))
    expected = [("support", "Support hours", 700)]
    if has_usage:
        expected.insert(0 if place else 1, ("usage", "", 300))
    shown = preview(acme, OCTOBER)
    assert shown is not None
    assert [(row.line_type, row.description, row.cents) for row in shown[1]] == expected
    assert balance(acme, OCTOBER) == -sum(cents for _, _, cents in expected)
    do_close_period(month, now=over(month))
    (draft,) = do_draft(month)
    assert (lines(draft), draft.subtotal) == (expected, shown[0].subtotal)
    final = do_finalize(draft, now=month.ends_at + timedelta(days=1))
    assert (lines(final), source.billed) == (expected, [final.number])
    assert_recomputed(final)
    pages = pypdf.PdfReader(io.BytesIO(pdf_of(final))).pages
    assert "Support hours" in "".join(page.extract_text() for page in pages)
    assert b"Support hours" in attached(final)[1]


def balance(tenant: Tenant, now: datetime) -> int:
    """Return the balance that a prepaid tenant without credit would have, in cents."""
    profile = BillingProfile(tenant=tenant, entity=period(now).entity, is_prepaid=True)
    with all_tenants_scope(BypassReason.BILLING):
        return available_nano(tenant, profile, now) // NANO_A_CENT


def add_minimum(tenant: Tenant, cents: int) -> None:
    rule = TermRule(TermType.MINIMUM, cents=cents)
    do_add_price_term(tenant, rule, description="Minimum", first_month="2026-10")


def rerate(amount: str, component: str = "uncached") -> list[Invoice]:
    """Apply a re-rating of October and return its notes."""
    new = NewPrice("alpha", Tier.STANDARD, Component(component), dollars(amount))
    start, end = datetime(2026, 10, 1, tzinfo=UTC), datetime(2026, 11, 1, tzinfo=UTC)
    row = do_apply_rerating(do_propose_rerating(Proposal((new,)), start, end, reason="Wrong price"), by=None)
    report = continue_reratings()
    assert report.left == []
    notes = unscoped(Invoice).filter(rerated__rerating=row)
    return sorted(notes, key=lambda note: note.pk)


def notes_of(tenant: Tenant, at: datetime) -> list[Invoice]:
    """Close the month, finalize its documents and return the corrections."""
    month = period(at)
    do_close_period(month, now=over(month))
    issued = [do_finalize(draft, now=month.ends_at) for draft in do_draft(month, tenant)]
    return [row for row in issued if row.invoice_type == Invoice.InvoiceType.CORRECTION]


def billed(tenant: Tenant) -> int:
    """Return the cents before tax of all documents."""
    rows = unscoped(Invoice).filter(tenant=tenant, number__isnull=False)
    return sum((-1 if row.is_credit_note else 1) * row.subtotal for row in rows)


@pytest.mark.parametrize(("currency", "amount"), [("USD", "0.005"), ("JPY", "0.5")])
def test_a_minimum_compares_with_the_rounded_lines(acme, currency, amount):
    """100 lines of half a cent are rounded to 1.00. The minimum of 50.00 adds 49.00, and nothing is carried."""
    book = "list" if currency == "USD" else "jpy"
    prices = [price(amount, model=f"m{number}", book=book, currency=currency) for number in range(100)]
    if currency != "USD":
        do_assign_book(acme, book)
    add_minimum(acme, 5000)
    for pk in prices:
        use(acme, OCTOBER, (pk, MILLION))
    october = invoiced(acme, OCTOBER)
    assert (october.subtotal, int(october.rounding_femto), lines(october)[-1]) == (5000, 0, ("term", "Minimum", 4900))
    assert_recomputed(october)


def test_a_rounded_sum_below_the_minimum_is_raised_to_it(acme):
    """100 lines of 0.504 are 50.40, and 50.00 when rounded: the minimum of 50.20 adds 0.20, which the carry returns."""
    add_minimum(acme, 5020)
    for number in range(100):
        use(acme, OCTOBER, (price("0.504", model=f"m{number}"), MILLION))
    october = invoiced(acme, OCTOBER)
    assert (october.subtotal, int(october.rounding_femto)) == (5020, -20 * FEMTO_A_CENT)


def test_a_minimum_covers_metered_usage_but_no_fees(acme):
    """Cache storage of 9.00 and a minimum of 10.00 charge 10.00. A fee of 3.00 and a one-off line are added."""
    add_minimum(acme, 1000)
    publish_storage_price("4.5")
    record_storage(acme, hours=20)
    credits.do_commit(acme, "Support", fee=300, included_nano=1, first_month="2026-10")
    do_add_one_off_line(acme, month="2026-10", description="Setup", cents=50)
    october = invoiced(acme, OCTOBER)
    assert [(kind, amount) for kind, _, amount in lines(october)] == [
        *(("metered", 900), ("term", 100), ("commitment", 300), ("one_off", 50)),
    ]
    assert_recomputed(october)


@pytest.mark.parametrize("steps", [("8", "60"), ("8", "40", "60"), ("40", "60"), ("60", "8", "60"), ("55", "60")])
def test_re_ratings_that_a_minimum_absorbs_are_not_forgotten(acme, steps):
    """The usage of 10.00 has a minimum of 50.00. Whatever prices come between, a last one of 60.00 charges 60.00."""
    add_minimum(acme, 5000)
    use(acme, OCTOBER, (price("10"), MILLION))
    documents = [invoiced(acme, OCTOBER)]
    for amount in steps:
        documents += rerate(amount)
        assert billed(acme) == max(5000, int(amount) * 100)
    assert_recomputed(*documents)


def test_a_minimum_absorbs_re_ratings_of_many_rounded_lines(acme):
    """100 lines of 0.005 change to 0.007. Below the minimum, the rounding of the lines changes nothing."""
    add_minimum(acme, 5000)
    for number in range(100):
        use(acme, OCTOBER, (price("0.005", model=f"m{number}"), MILLION))
    invoiced(acme, OCTOBER)
    new = [NewPrice(f"m{number}", Tier.STANDARD, Component.UNCACHED, dollars("0.011")) for number in range(100)]
    start, end = datetime(2026, 10, 1, tzinfo=UTC), datetime(2026, 11, 1, tzinfo=UTC)
    do_apply_rerating(do_propose_rerating(Proposal(tuple(new)), start, end, reason="Wrong"), by=None)
    assert continue_reratings().issued == []
    assert billed(acme) == 5000


def test_reversed_usage_that_a_minimum_absorbs_has_no_document(acme):
    """Two uses of 5.00 have a minimum of 50.00. The reversal of one changes nothing, and counts in later notes."""
    add_minimum(acme, 5000)
    use(acme, OCTOBER, (price("5"), MILLION), times=2)
    october = invoiced(acme, OCTOBER)
    one, other = unscoped(UsageEvent).all()
    take_back(one, NOVEMBER)
    assert notes_of(acme, NOVEMBER) == []
    assert do_draft(period(NOVEMBER), acme) == []
    assert [row.state for row in unscoped(Invoice).filter(period=period(NOVEMBER), invoice_type="correction")] == []
    (debit,) = rerate("60")
    assert (debit.subtotal, billed(acme)) == (1000, 6000 + 5000)  # the minimum of November
    take_back(other, DECEMBER)
    (correction,) = notes_of(acme, DECEMBER)
    assert (correction.subtotal, billed(acme)) == (1000, 3 * 5000)
    assert_recomputed(october, debit, correction)


def test_a_month_of_free_usage_has_no_document(acme):
    use(acme, OCTOBER, (price("0"), MILLION))
    month = period(OCTOBER)
    do_close_period(month, now=over(month))
    assert do_draft(month) == []
    assert unscoped(Invoice).all() == []


def publish_storage_price(amount: str) -> None:
    rows = ["model,tier,component,usd_per_million", f"alpha,standard,cache_storage,{amount}"]
    do_publish_prices(do_propose_prices(read_csv(rows), effective_from=datetime(2026, 9, 1, tzinfo=UTC)), by=None)


def record_storage(tenant: Tenant, *, hours: float, reference: str = "c1", at: datetime = OCTOBER) -> MeteredUsage:
    """Record the storage of 100,000 tokens."""
    end = at + timedelta(hours=hours)
    row, _ = do_record_metered_usage(tenant, Component.CACHE_STORAGE, "alpha", 100_000, at, end, reference=reference)
    return row


def test_metered_usage_is_re_rated(acme):
    """100,000 tokens for 1.5 hours at 4500 per million cost 675.00, and 1350.00 at 9000. A reversal is counted."""
    publish_storage_price("4500")
    record_storage(acme, hours=1.5)
    october = invoiced(acme, OCTOBER)
    assert october.subtotal == 67500
    (debit,) = rerate("9000", "cache_storage")
    assert billed(acme) == 135000
    assert lines(debit) == [
        ("metered", "Cache storage: 150000 token-hours, price corrected from $4500.00 to $9000.00 per million", 67500)
    ]
    (credit,) = rerate("3000", "cache_storage")
    assert (credit.invoice_type, billed(acme)) == ("credit_note", 45000)
    do_reverse_metered_usage(unscoped(MeteredUsage).all()[0])
    (correction,) = notes_of(acme, NOVEMBER)
    assert (correction.subtotal, billed(acme)) == (45000, 0)
    assert_recomputed(october, debit, credit, correction)


def test_metered_usage_is_reversed_once(acme):
    """Before its month is closed, reversed usage is on no line. Afterwards the next month credits it."""
    publish_storage_price("4.5")
    wrong, right, late = (
        record_storage(acme, hours=hours, reference=reference) for reference, hours in (("a", 3), ("b", 2), ("c", 4))
    )
    reversal = do_reverse_metered_usage(wrong)
    assert do_reverse_metered_usage(wrong).pk == reversal.pk
    with pytest.raises(Conflict, match="reversal"):
        do_reverse_metered_usage(reversal)
    october = invoiced(acme, OCTOBER)
    assert lines(october) == [("metered", "Cache storage: 600000 token-hours at $4.50 per million", 270)]
    do_reverse_metered_usage(late)
    (correction,) = notes_of(acme, NOVEMBER)
    assert lines(correction) == [("metered", "Cache storage: 400000 token-hours at $4.50 per million", 180)]
    assert (correction.refers_to_id, billed(acme)) == (october.pk, 90)
    assert notes_of(acme, NOVEMBER) == []
    (debit,) = rerate("9", "cache_storage")
    assert (debit.subtotal, billed(acme)) == (90, 180)
    assert_recomputed(october, correction, debit)
    assert right.reverses_id is None


def test_a_re_rating_of_an_earlier_release_does_not_charge_metered_usage(acme):
    """Its prices had no effect on metered usage. An upgrade must not issue notes for it."""
    publish_storage_price("4500")
    record_storage(acme, hours=1.5)
    invoiced(acme, OCTOBER)
    new = NewPrice("alpha", Tier.STANDARD, Component.CACHE_STORAGE, dollars("9000"))
    start, end = datetime(2026, 10, 1, tzinfo=UTC), datetime(2026, 11, 1, tzinfo=UTC)
    row = do_propose_rerating(Proposal((new,)), start, end, reason="Wrong price")
    with all_tenants_scope(BypassReason.PRICES):
        Rerating.objects.filter(pk=row.pk).update(has_metered=False)
        row.refresh_from_db()
    do_apply_rerating(row, by=None)
    assert continue_reratings().issued == []
    rerate("6000", "cache_storage")
    assert billed(acme) == 90000


def test_a_check_reports_months_that_an_earlier_release_charged_wrongly(acme, monkeypatch):
    """Earlier minimums did not cover metered usage. The check has the amount, and changes nothing."""
    add_minimum(acme, 1000)
    publish_storage_price("4.5")
    record_storage(acme, hours=20)
    with monkeypatch.context() as patch:
        patch.setattr(term_lines, "_covered_by_terms", lambda lines: [row for row in lines if row.price_id is not None])
        october = invoiced(acme, OCTOBER)
    assert october.subtotal == 1900
    found = check(october)
    assert (found.month_difference, found.same_data, found.ledger_difference) == (-900, False, 0)
    assert billed(acme) == 1900


def test_a_check_reports_re_ratings_that_an_earlier_release_forgot(acme, monkeypatch):
    """Usage of 10.00 with a minimum of 50.00, at 8.00 and then at 60.00, was charged with 62.00."""
    add_minimum(acme, 5000)
    use(acme, OCTOBER, (price("10"), MILLION))
    october = invoiced(acme, OCTOBER)
    with monkeypatch.context() as patch:
        patch.setattr(term_lines, "_recompute_lines", lambda row, invoice: [])
        (debit,) = [*rerate("8"), *rerate("60")]
    assert billed(acme) == 6200
    assert [check(row).month_difference for row in (october, debit)] == [-200, -200]


def test_every_amount_of_a_month_comes_from_the_sources(acme, monkeypatch):
    """Without sources there are no drafts, previews, corrections or notes of re-ratings."""
    alpha = price("3")
    use(acme, OCTOBER, (alpha, MILLION))
    invoiced(acme, OCTOBER)
    take_back(unscoped(UsageEvent).all()[0], NOVEMBER)
    use(acme, NOVEMBER, (price("2", model="beta"), MILLION))
    month = period(NOVEMBER)
    do_close_period(month, now=over(month))
    with monkeypatch.context() as patch:
        patch.setattr(month_charges, "SOURCES", [])
        shown = preview(acme, NOVEMBER)
        assert shown is not None
        assert (shown[1], do_draft(month), rerate("9")) == ([], [], [])
    assert sorted(row.subtotal for row in do_draft(month)) == [200, 300]
