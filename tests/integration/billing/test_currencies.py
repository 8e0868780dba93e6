"""Tenants that are billed in other currencies than USD: prices, documents, payments, tax and the ledger."""

from __future__ import annotations

from datetime import UTC, date, datetime

import pytest
from django.db import IntegrityError, connection

from billing.invoicing.corrections import do_issue_credit_note, do_issue_debit_note
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.exports import html
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.reratings import continue_reratings, do_apply_rerating, do_propose_rerating
from billing.invoicing.setup import do_add_exchange_rate, do_set_profile
from billing.ledger.ledger import PostedEntry
from billing.models import (
    Account,
    BillingProfile,
    Invoice,
    LedgerEntry,
    LedgerTransaction,
    NumberSeries,
    TopUp,
)
from billing.payments.events import do_record_event
from billing.payments.recording import Received, do_record_payment
from billing.payments.stripe import Stripe
from billing.payments.top_up_results import end_top_up
from billing.pricing.currencies import exchange_rate
from billing.pricing.prices import do_assign_book, do_discard_prices, do_propose_prices
from billing.rates.price_book import NewPrice, Proposal
from billing.rates.price_files import read_csv
from billing.rates.pricing import Component, Tier
from tenants.actions import ActionRefused, Conflict, do_add_member, do_create_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant, User
from tests.support.billing import stripe_events as stripe
from tests.support.billing.books import NOVEMBER, OCTOBER, dollars, invoiced, over, period, price, use
from tests.support.billing.currencies import CSV, MILLION, assert_valid, bill, in_currency, sums_by_currency
from tests.support.billing.invoice_forms import attached, document_of, furnish
from tests.support.billing.prepaid_credit import change_entity
from tests.support.rows import unscoped
from tests.support.tenants.management_api import by_person

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]


@pytest.fixture
def acme(acme: Tenant) -> Tenant:
    """The tenant, billed in EUR."""
    in_currency(acme, "EUR")
    return acme


def test_a_tenant_is_billed_in_the_currency_of_its_price_book(acme):
    """Two tenants, two currencies, one series of numbers; the ledger sums to zero in each currency."""
    globex = do_create_tenant("globex", "Globex")
    furnish(acme, "S", 190_000)
    euros, other = bill(acme, "100"), None
    use(globex, NOVEMBER, (price("50", model="usd", number=11), MILLION))
    other = invoiced(globex, NOVEMBER)
    assert [(row.currency, row.subtotal, row.total) for row in (euros, other)] == [
        *(("EUR", 10_000, 11_900), ("USD", 5_000, 5_950)),
    ]
    _, xml = attached(euros)
    assert b"<ram:InvoiceCurrencyCode>EUR</ram:InvoiceCurrencyCode>" in xml
    page = html(document_of(euros))
    assert "€119.00" in page and "€100.00 / M" in page and "Prices are in EUR" in page and "$" not in page
    note = do_issue_credit_note(euros, [("SLA", 1_000)], "SLA")
    debit = do_issue_debit_note(euros, [("Support", 500)], "Support")
    assert (note.currency, debit.currency) == ("EUR", "EUR")
    with pytest.raises(Conflict, match="is in USD, but acme is billed in EUR"):
        do_record_payment(Received("manual", "p0", 100, NOVEMBER, tenant="acme", currency="USD"))
    do_record_payment(Received("manual", "p1", 11_305, NOVEMBER, tenant="acme"))  # its own, if none is given
    do_record_payment(Received("manual", "p2", 5_950, NOVEMBER, tenant="globex", currency="USD"))
    assert {row.state for row in unscoped(Invoice).all()} == {"paid"}
    assert sums_by_currency() == {"EUR": 0, "USD": 0}
    assert_valid(euros, other, note, debit)


def test_a_re_rating_of_a_book_corrects_its_invoices_in_its_currency(acme):
    invoice = bill(acme, "10")
    new = NewPrice("mEUR10", Tier.STANDARD, Component.UNCACHED, dollars("6"))
    start, end = datetime(2026, 10, 1, tzinfo=UTC), datetime(2026, 11, 1, tzinfo=UTC)
    do_apply_rerating(do_propose_rerating(Proposal((new,)), start, end, reason="Wrong price", book="eur"), by=None)
    (number,) = continue_reratings().issued
    (note,) = unscoped(Invoice).filter(number=number)
    assert (note.currency, note.subtotal) == ("EUR", 400)
    assert "from €10.00 to €6.00" in html(document_of(note))
    assert_valid(invoice, note)


def test_stripe_payments_in_euros_pay_invoices_in_euros(acme):
    invoice = bill(acme, "5")
    bodies = [stripe.payment(500, currency="eur", metadata={"invoice": invoice.number}), stripe.refund(currency="eur")]
    for body in bodies:
        do_record_event(Stripe(stripe.SECRET).event(body, stripe.signed(body)))
    (row,) = unscoped(Invoice).all()
    assert row.state == "open"  # 2.00 was refunded
    assert sums_by_currency() == {"EUR": 0}


def test_no_tax_is_converted_if_the_returns_are_in_the_same_currency(acme):
    furnish(acme, "S", 190_000)
    change_entity(tax_currency="EUR")
    invoice = bill(acme, "100")
    assert "tax_currency" not in document_of(invoice)
    assert_valid(invoice)


def test_tax_and_display_are_converted_from_the_currency_of_the_bill(acme):
    """GBP 1 is EUR 1.2 by the dollar rates of both."""
    globex = do_create_tenant("globex", "Globex")
    in_currency(globex, "GBP")
    furnish(globex, "S", 200_000)
    change_entity(tax_currency="EUR")
    with all_tenants_scope(BypassReason.BILLING):
        BillingProfile.objects.all_tenants().update(currency="CHF")
    use(globex, OCTOBER, (price("10", book="gbp", model="x", number=10), MILLION))
    month = period(OCTOBER)
    do_close_period(month, now=over(month))
    (draft,) = do_draft(month, globex)
    with pytest.raises(Conflict, match="no exchange rate of EUR"):
        do_finalize(draft, now=month.ends_at)
    for currency, micro in (("EUR", 900_000), ("GBP", 750_000)):
        do_add_exchange_rate(currency=currency, on=date(2026, 10, 30), micro_per_usd=micro)
    with all_tenants_scope(BypassReason.BILLING):
        assert exchange_rate("GBP", "EUR", date(2026, 11, 1)) == (1_200_000, 6)
        assert exchange_rate("GBP", "CHF", date(2026, 11, 1)) is None
    invoice = do_finalize(draft, now=month.ends_at)
    shown = document_of(invoice)
    assert shown["tax_currency"] == {"currency": "EUR", "micro_per_gbp": 1_200_000, "tax": 240, "rate_on": "2026-10-30"}
    assert shown["display"] is None  # CHF has no rate
    assert "at 1.20 per GBP" in html(shown)
    assert_valid(invoice)


def test_rates_of_low_valued_currencies_have_more_decimals(acme):
    """IDR 16,250 per dollar: with 6 decimals, EUR 0.000057 per IDR would be wrong by 0.7 percent."""
    globex = do_create_tenant("globex", "Globex")
    in_currency(globex, "IDR")
    furnish(globex, "S", 200_000)
    change_entity(tax_currency="EUR")
    with all_tenants_scope(BypassReason.BILLING):
        BillingProfile.objects.all_tenants().update(currency="GBP")
    for currency, micro in (("EUR", 920_000), ("GBP", 750_000), ("IDR", 16_250_000_000)):
        do_add_exchange_rate(currency=currency, on=date(2026, 10, 30), micro_per_usd=micro)
    invoice = bill(globex, "100000", currency="IDR")
    shown = document_of(invoice)
    assert (invoice.total, shown["tax_currency"]) == (
        12_000_000,
        {"currency": "EUR", "pico_per_idr": 56_615_385, "tax": 113, "rate_on": "2026-10-30"},
    )
    assert shown["display"] == {"currency": "GBP", "pico_per_idr": 46_153_846, "total": 554, "rate_on": "2026-10-30"}
    page = html(shown)
    assert "at 0.000056615385 per IDR" in page and "GBP 5.54 at 0.000046153846 per IDR" in page
    notes = [do_issue_credit_note(invoice, [("SLA", cents)], "SLA") for cents in (3_333_333, 6_666_667)]
    assert sum(document_of(note)["tax_currency"]["tax"] for note in notes) == 113
    assert_valid(invoice, *notes)


def test_a_note_has_the_rate_of_an_invoice_that_an_earlier_release_issued(acme):
    globex = do_create_tenant("globex", "Globex")
    in_currency(globex, "SEK")
    furnish(globex, "S", 250_000)
    change_entity(tax_currency="EUR")
    for currency, micro in (("EUR", 920_000), ("GBP", 750_000), ("SEK", 10_500_000)):
        do_add_exchange_rate(currency=currency, on=date(2026, 10, 30), micro_per_usd=micro)
    use(globex, OCTOBER, (price("100", book="sek", model="x", number=10), MILLION))
    month = period(OCTOBER)
    do_close_period(month, now=over(month))
    (draft,) = do_draft(month, globex)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("billing.pricing.currencies.FINE_RATE_DIGITS", 6)
        invoice = do_finalize(draft, now=month.ends_at)
    assert document_of(invoice)["tax_currency"] == {
        "currency": "EUR",
        "micro_per_sek": 87_619,
        "tax": 219,
        "rate_on": "2026-10-30",
    }
    with all_tenants_scope(BypassReason.BILLING):
        BillingProfile.objects.all_tenants().update(currency="GBP")
    note = document_of(do_issue_credit_note(invoice, [("SLA", 10_000)], "SLA"))
    assert note["tax_currency"] == {"currency": "EUR", "micro_per_sek": 87_619, "tax": 219, "rate_on": "2026-10-30"}
    assert note["display"] == {"currency": "GBP", "micro_per_sek": 71_429, "total": 893, "rate_on": "2026-10-30"}


def test_the_currency_of_a_tenant_never_changes(acme):
    do_assign_book(acme, "list")
    do_assign_book(acme, "eur")
    do_record_payment(Received("manual", "p1", 100, NOVEMBER, tenant="acme"))
    with pytest.raises(Conflict, match="payments, budgets or prices in EUR"):
        do_assign_book(acme, "list")
    for book, currency, reason in (("eur", "USD", "another currency"), ("list", "EUR", "another currency")):
        with pytest.raises(ActionRefused, match=reason):
            do_propose_prices(read_csv(CSV), book=book, currency=currency)
    with pytest.raises(ActionRefused, match="Use a three-letter currency code"):
        do_propose_prices(read_csv(CSV), book="new", currency="XXX")


def test_the_currency_waits_for_drafts_and_top_ups(acme):
    """Their amounts have no currency of their own: published or charged later, they would be in the new one."""
    draft = do_propose_prices(read_csv(CSV), tenant=acme)
    with pytest.raises(Conflict, match="draft or scheduled prices, a pending top-up or automatic top-ups in EUR"):
        do_assign_book(acme, "list")
    do_discard_prices(draft, by=None)
    with all_tenants_scope(BypassReason.BILLING):
        top_up = TopUp.objects.create(tenant=acme, cents=500)
    with pytest.raises(Conflict, match="pending top-up"):
        do_assign_book(acme, "list")
    end_top_up(top_up, TopUp.State.FAILED)
    do_set_profile(acme)
    with all_tenants_scope(BypassReason.BILLING):
        BillingProfile.objects.for_tenant(acme).update(payment_method="pm_1")
    do_set_profile(acme, top_up_below=100, top_up_cents=500)
    with pytest.raises(Conflict, match="automatic top-ups"):
        do_assign_book(acme, "list")
    do_set_profile(acme, top_up_below=None, top_up_cents=None)
    do_assign_book(acme, "list")


def test_usage_with_a_price_in_another_currency_is_not_invoiced(acme):
    use(acme, OCTOBER, (price("10"), MILLION))  # admitted just before the book was assigned
    month = period(OCTOBER)
    do_close_period(month, now=over(month))
    (draft,) = do_draft(month, acme)
    with pytest.raises(Conflict, match="another currency than EUR"):
        do_finalize(draft)
    assert not NumberSeries.objects.exists()


def test_the_ledger_rejects_a_transaction_in_another_currency_than_its_invoice(acme):
    invoice = bill(acme, "10")
    entries = [PostedEntry(Account.RECEIVABLE, 1, invoice.pk), PostedEntry(Account.REVENUE, -1, invoice.pk)]
    with (
        pytest.raises(IntegrityError, match="another currency than its invoice"),
        all_tenants_scope(BypassReason.BILLING),
        connection.cursor() as cursor,
    ):
        row = LedgerTransaction.objects.create(tenant_id=acme.pk, key="k", currency="USD")
        LedgerEntry.objects.all_tenants().bulk_create(
            LedgerEntry(transaction=row, tenant_id=acme.pk, **entry._asdict()) for entry in entries
        )
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")


def test_the_api_names_the_currency(acme):
    invoice = bill(acme, "5")
    user = User.objects.create_user("b@acme.example")
    do_add_member(acme, user, "billing")
    client = by_person(user)
    assert client.get("/api/billing/profile").json()["billing_currency"] == "EUR"
    assert client.get("/api/invoices").json()["results"][0]["currency"] == "EUR"
    assert client.get(f"/api/invoices/{invoice.pk}").json()["document"]["currency"] == "EUR"
    assert {row["currency"] for row in client.get("/api/ledger").json()["results"]} == {"EUR"}
