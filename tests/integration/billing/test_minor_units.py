"""Currencies whose minor unit is not a hundredth: JPY has no decimals, KWD has three."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

import pytest
from django.core.management import call_command

from billing.currencies.amounts import dollars
from billing.currencies.stripe_amounts import from_stripe, smallest_charge, to_stripe
from billing.invoicing.corrections import do_issue_credit_note, do_issue_debit_note, do_write_off
from billing.invoicing.emails import InvoiceEmailOutbox
from billing.invoicing.exports import as_csv, html
from billing.invoicing.one_off_lines import do_add_one_off_line
from billing.invoicing.price_terms import do_add_price_term
from billing.invoicing.purchases import do_sell_credit
from billing.invoicing.reratings import continue_reratings, do_apply_rerating, do_propose_rerating
from billing.invoicing.setup import do_add_exchange_rate, do_set_prepaid, do_set_profile
from billing.ledger.credits import do_commit, do_grant_credit
from billing.ledger.ledger import balance
from billing.ledger.matching import sum_outstanding
from billing.models import (
    Account,
    BillingProfile,
    Budget,
    CreditGrant,
    Invoice,
    InvoiceEmail,
    InvoiceLine,
    LedgerEntry,
    Payment,
    PaymentEvent,
)
from billing.payments.events import do_record_event
from billing.payments.file_drop import collect
from billing.payments.recording import Received, do_record_payment
from billing.payments.stripe import Stripe
from billing.payments.top_ups import do_start_payment, do_start_top_up
from billing.rates.price_book import NewPrice, Proposal
from billing.rates.pricing import Component, Tier
from billing.rates.terms import TermRule, TermType
from tenants.actions import ActionRefused, Conflict, do_create_tenant
from tenants.actions.common import FieldRefused
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tests.support.billing import stripe_events as stripe
from tests.support.billing.books import NOVEMBER, OCTOBER, make_months, price, use
from tests.support.billing.books import dollars as nano
from tests.support.billing.currencies import assert_valid, bill, in_currency, sums_by_currency
from tests.support.billing.fake_stripe import FakeStripe
from tests.support.billing.invoice_forms import attached, document_of, furnish
from tests.support.billing.prepaid_credit import change_entity
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db
MILLION = 10**6
YEN, FILS = 10**9, 10**6  # in nano-units


def tenant_in(currency: str, rate: int = 100_000) -> Tenant:
    """Return a tenant that is billed in a currency, with a tax rule."""
    make_months()
    tenant = do_create_tenant("acme", "Acme")
    in_currency(tenant, currency)
    furnish(tenant, "S", rate)
    return tenant


@pytest.fixture
def yen() -> Tenant:
    return tenant_in("JPY")


@pytest.fixture
def dinars() -> Tenant:
    return tenant_in("KWD", 50_000)


def on(account: Account, tenant: Tenant) -> int:
    with all_tenants_scope(BypassReason.BILLING):
        return balance(tenant.pk, account)


def owed(invoice: Invoice) -> int:
    with all_tenants_scope(BypassReason.BILLING):
        return sum_outstanding(invoice)


def test_an_invoice_in_yen_has_no_decimals(yen):
    """1234.567 becomes 1235, its tax of 123.5 becomes 124, and the rounding of 0.433 is carried exactly."""
    invoice = bill(yen, "1234.567", currency="JPY")
    assert (invoice.subtotal, invoice.total, int(invoice.rounding_femto)) == (1235, 1359, 433 * 10**12)
    assert (on(Account.REVENUE, yen), on(Account.TAX, yen), owed(invoice)) == (-1235 * YEN, -124 * YEN, 1359)
    shown = document_of(invoice)
    page = html(shown)
    assert "JPY 1,359" in page and "JPY 1,235" in page and "JPY 1234.567 / M" in page
    assert "1,359." not in page and "13.59" not in page
    assert as_csv(shown).splitlines()[1].endswith(",1234.567,1234.567,1235")
    _, xml = attached(invoice)
    assert b"<ram:GrandTotalAmount>1359</ram:GrandTotalAmount>" in xml
    assert b"<ram:LineTotalAmount>1235</ram:LineTotalAmount>" in xml
    with all_tenants_scope(BypassReason.BILLING):
        row = InvoiceEmail.objects.all_tenants().select_related("invoice__period", "invoice__tenant").get()
        assert "of JPY 1,359 for October 2026" in InvoiceEmailOutbox().compose(row).body
    note = do_issue_credit_note(invoice, [("SLA", 335)], "SLA")
    debit = do_issue_debit_note(invoice, [("Support", 500)], "Support")
    assert (note.total, debit.total) == (369, 550)  # tax: 34 of 33.5, and 50
    with pytest.raises(Conflict, match="Only JPY 900 of this invoice"):
        do_issue_credit_note(invoice, [("SLA", 901)], "SLA")
    assert_valid(invoice, note, debit)


def test_an_invoice_in_dinars_has_three_decimals(dinars):
    """EN 16931 allows two decimals: the XML rounds each amount and states the difference."""
    for model in "ab":
        use(dinars, OCTOBER, (price("1.2341", book="kwd", currency="KWD", model=model), MILLION))
    invoice = bill(dinars, "0.0004", currency="KWD")
    assert (invoice.subtotal, invoice.total, int(invoice.rounding_femto)) == (2468, 2591, -6 * 10**11)
    assert (on(Account.REVENUE, dinars), on(Account.TAX, dinars)) == (-2468 * FILS, -123 * FILS)
    page = html(document_of(invoice))
    assert "KWD 2.591" in page and "KWD 1.234" in page
    _, xml = attached(invoice)
    for name, amount in (
        ("LineTotal", "1.23"),
        ("TaxBasisTotal", "2.46"),
        ("Rounding", "0.01"),
        ("DuePayable", "2.59"),
    ):
        assert f"<ram:{name}Amount>{amount}</ram:{name}Amount>".encode() in xml
    note = do_issue_credit_note(invoice, [("SLA", 334)], "SLA")
    assert note.total == 351
    assert_valid(invoice, note)


@pytest.mark.parametrize(("currency", "unit"), [("JPY", YEN), ("KWD", FILS)])
def test_credit_prepaid_credit_and_payments_are_in_the_minor_unit(currency, unit):
    tenant = tenant_in(currency)
    furnished = {"starts_at": OCTOBER}
    do_grant_credit(tenant, CreditGrant.GrantType.PROMOTIONAL, 100 * unit + unit // 2, **furnished)
    do_record_payment(Received("manual", "p0", 1000, OCTOBER, tenant="acme"))
    with pytest.raises(ActionRefused, match=f"multiples of {dollars(1, currency)}"):
        do_sell_credit(tenant, unit + unit // 2)
    do_sell_credit(tenant, 1000 * unit, **furnished)
    purchase = unscoped(Invoice).get(invoice_type="purchase")
    assert (purchase.total, on(Account.DEPOSITS, tenant)) == (1000, 0)
    whole = f"{1600 * unit // 10**9}.{1600 * unit % 10**9:09}"
    invoice = bill(tenant, whole, currency=currency)
    # 1600 less 100 of credit, half a unit of which stays; with 10 % of tax, less 1000 of prepaid credit.
    assert (invoice.subtotal, invoice.taxable, invoice.total, invoice.prepaid) == (1600, 1500, 1650, 1000)
    assert (on(Account.CREDITS, tenant), owed(invoice)) == (-unit // 2, 650)
    do_record_payment(Received("manual", "p1", 600, NOVEMBER, tenant="acme", invoice=invoice.number))
    do_write_off(unscoped(Invoice).get(pk=invoice.pk), "Gone")
    assert on(Account.BAD_DEBT, tenant) == 45 * unit  # without its tax of 5
    do_record_payment(Received("manual", "p2", 50, NOVEMBER, tenant="acme"))
    assert (unscoped(Invoice).get(pk=invoice.pk).state, on(Account.BAD_DEBT, tenant)) == ("paid", 0)
    do_record_payment(Received("manual", "r1", -650, NOVEMBER, invoice=invoice.number))
    assert (owed(invoice), on(Account.CASH, tenant)) == (650, 1000 * unit)
    assert sums_by_currency() == {currency: 0}
    assert_valid(purchase, invoice)


def test_terms_one_off_lines_and_commitments_are_in_the_minor_unit(yen):
    do_add_price_term(yen, TermRule(TermType.MINIMUM, cents=500), description="Minimum", first_month="2026-10")
    do_commit(yen, "Fee", fee=700, included_nano=YEN, first_month="2026-10")
    do_add_one_off_line(yen, month="2026-10", description="Setup", cents=90)
    invoice = bill(yen, "0.4", currency="JPY")
    rows = [(row.line_type, row.cents, int(row.femto)) for row in unscoped(InvoiceLine).filter(invoice_id=invoice.pk)]
    assert rows == [
        ("usage", 0, 4 * 10**14),
        ("term", 500, 4996 * 10**14),
        ("commitment", 700, 700 * 10**15),
        ("one_off", 90, 90 * 10**15),
    ]
    assert_valid(invoice)


def test_a_rerating_is_in_the_minor_unit(yen):
    invoice = bill(yen, "1000", currency="JPY")
    new = NewPrice("mJPY10", Tier.STANDARD, Component.UNCACHED, nano("1200.4"))
    october = datetime(2026, 10, 1, tzinfo=UTC), datetime(2026, 11, 1, tzinfo=UTC)
    do_apply_rerating(do_propose_rerating(Proposal((new,)), *october, reason="Wrong", book="jpy"), by=None)
    (number,) = continue_reratings().issued
    note = unscoped(Invoice).get(number=number)
    assert (note.invoice_type, note.subtotal, note.total, int(note.rounding_femto)) == (
        "debit_note",
        200,
        220,
        -4 * 10**14,
    )
    assert_valid(invoice, note)


def test_rounding_is_carried_in_the_minor_unit(yen):
    for model in "abc":
        use(yen, OCTOBER, (price("0.45", book="jpy", currency="JPY", model=model), MILLION))
    assert bill(yen, "0.4", currency="JPY").total == 0
    invoice = bill(yen, "10", NOVEMBER, currency="JPY")
    (line,) = unscoped(InvoiceLine).filter(line_type="rounding")
    assert (line.cents, invoice.subtotal) == (1, 11)  # of 1.75


def test_tax_and_display_are_converted_to_the_minor_unit_of_their_currency(dinars):
    """KWD 2.000 at JPY 500 per KWD are JPY 1000, and not 10 or 100,000."""
    change_entity(tax_currency="JPY")
    with all_tenants_scope(BypassReason.BILLING):
        BillingProfile.objects.all_tenants().update(currency="BHD")
    for currency, micro in (("JPY", 150_000_000), ("KWD", 300_000), ("BHD", 375_000)):
        do_add_exchange_rate(currency=currency, on=date(2026, 10, 30), micro_per_usd=micro)
    invoice = bill(dinars, "2", currency="KWD")
    shown = document_of(invoice)
    assert shown["tax_currency"] == {
        "currency": "JPY",
        "micro_per_kwd": 500_000_000,
        "tax": 50,
        "digits": 0,
        "rate_on": "2026-10-30",
    }
    assert shown["display"] == {
        "currency": "BHD",
        "micro_per_kwd": 1_250_000,
        "total": 2625,
        "digits": 3,
        "rate_on": "2026-10-30",
    }
    page = html(shown)
    assert "Tax in JPY: 50, at 500.00 per KWD" in page and "BHD 2.625 at 1.25 per KWD" in page
    notes = [do_issue_credit_note(invoice, [("SLA", cents)], "SLA") for cents in (333, 1667)]
    assert [document_of(note)["tax_currency"]["tax"] for note in notes] == [9, 41]  # of 17 and 83 fils: 8.5 and 41.5
    assert_valid(invoice, *notes)


def test_a_note_on_a_document_of_an_earlier_release_keeps_its_decimals(dinars):
    change_entity(tax_currency="JPY")
    for currency, micro in (("JPY", 150_000_000), ("KWD", 300_000)):
        do_add_exchange_rate(currency=currency, on=date(2026, 10, 30), micro_per_usd=micro)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("billing.invoicing.finalizing.minor_digits", lambda currency: 3 if currency == "KWD" else 2)
        invoice = bill(dinars, "2", currency="KWD")
    old = document_of(invoice)["tax_currency"]
    assert old == {"currency": "JPY", "micro_per_kwd": 500_000_000, "tax": 5000, "rate_on": "2026-10-30"}
    note = document_of(do_issue_credit_note(invoice, [("SLA", 1000)], "SLA"))
    assert note["tax_currency"] == {
        "currency": "JPY",
        "micro_per_kwd": 500_000_000,
        "tax": 2500,
        "rate_on": "2026-10-30",
    }
    assert "Tax in JPY: 25.00" in html(note)
    assert_valid(invoice)


def test_the_gate_of_a_prepaid_tenant_counts_the_minor_unit(yen):
    do_set_prepaid(yen, is_prepaid=True)
    do_record_payment(Received("manual", "p0", 1100, OCTOBER, tenant="acme"))
    do_add_one_off_line(yen, month="2026-10", description="Setup", cents=90)
    gate = unscoped(Budget).get(is_balance=True)
    assert gate.amount == 910 * YEN  # 1100 pay 1000 and its tax


# Payments


@pytest.mark.parametrize(
    ("currency", "cents", "amount"),
    [
        *(("USD", 150, 150), ("JPY", 150, 150), ("KWD", 5120, 5120)),
        *(("ISK", 5, 500), ("UGX", 5, 500), ("MGA", 500, 5)),  # Stripe's exceptions
    ],
)
def test_amounts_of_stripe(currency, cents, amount):
    assert (to_stripe(cents, currency), from_stripe(amount, currency)) == (amount, cents)


@pytest.mark.parametrize(
    ("currency", "cents"), [("KWD", 5124), ("MGA", 501), ("USD", 10**8), ("ISK", 10**6), ("USD", 0)]
)
def test_amounts_that_stripe_cannot_charge(currency, cents):
    with pytest.raises(ValueError, match="the amount is"):
        to_stripe(cents, currency)


def test_an_amount_of_stripe_with_a_fraction_is_rejected():
    with pytest.raises(ValueError, match="fraction"):
        from_stripe(550, "ISK")


def booked_by(*bodies: bytes) -> None:
    for body in bodies:
        do_record_event(Stripe(stripe.SECRET).event(body, stripe.signed(body)))


@pytest.mark.parametrize(("currency", "amount", "refunded"), [("JPY", 550, 200), ("ISK", 55_000, 20_000)])
def test_stripe_pays_and_refunds_invoices_without_decimals(currency, amount, refunded):
    invoice = bill(tenant_in(currency), "500", currency=currency)
    code = currency.lower()
    booked_by(stripe.payment(amount, currency=code, metadata={"invoice": invoice.number}))
    assert (unscoped(Invoice).get().state, unscoped(Payment).get().cents) == ("paid", 550)
    booked_by(stripe.refund(cents=refunded, currency=code), stripe.dispute(cents=refunded, currency=code))
    assert owed(invoice) == 400
    booked_by(stripe.dispute("reinstated", cents=refunded, currency=code))
    assert owed(invoice) == 200


def test_a_payment_of_stripe_with_a_fraction_fails():
    invoice = bill(tenant_in("ISK"), "500", currency="ISK")
    booked_by(stripe.payment(50_050, currency="isk", metadata={"invoice": invoice.number}))
    assert (unscoped(PaymentEvent).get().status, unscoped(Payment).count()) == ("failed", 0)


@pytest.mark.parametrize(
    ("currency", "price_of", "amount"), [("JPY", "500", "550"), ("ISK", "500", "55000"), ("KWD", "5.124", "5640")]
)
def test_hosted_pages_charge_the_amount_that_the_provider_accepts(fake_stripe: FakeStripe, currency, price_of, amount):
    """KWD 5.636 with tax: the provider charges 5.640, and 0.004 remain a deposit."""
    tenant = tenant_in(currency)
    invoice = bill(tenant, price_of, currency=currency)
    do_start_payment(invoice)
    fields = fake_stripe.requests[-1][1]
    assert fields["line_items[0][price_data][unit_amount]"] == amount
    assert fields["line_items[0][price_data][currency]"] == currency.lower()
    booked_by(stripe.payment(int(amount), currency=currency.lower(), metadata={"invoice": invoice.number}))
    assert unscoped(Invoice).get().state == "paid"
    assert on(Account.DEPOSITS, tenant) == (-4 * FILS if currency == "KWD" else 0)


def test_top_ups_are_of_amounts_that_the_provider_accepts(fake_stripe: FakeStripe, dinars):
    with pytest.raises(ActionRefused, match=r"cannot charge KWD 5\.124: the amount is not a multiple of 10"):
        do_start_top_up(dinars, 5124)
    with all_tenants_scope(BypassReason.BILLING):
        BillingProfile.objects.all_tenants().update(payment_method="pm_1")
    with pytest.raises(FieldRefused, match="multiple of 10"):
        do_set_profile(dinars, top_up_below=1000, top_up_cents=5124)
    do_set_profile(dinars, top_up_below=1000, top_up_cents=5120)
    assert smallest_charge("KWD") == 10


@pytest.mark.parametrize(
    ("currency", "text", "cents"),
    [("JPY", "1250", 1250), ("KWD", "1.25", 1250), ("KWD", "1.2345", None), ("JPY", "1.5", None)],
)
@pytest.mark.parametrize("named", [True, False])
def test_files_have_amounts_with_the_decimals_of_the_currency(tmp_path, currency, text, cents, named):
    tenant_in(currency)
    code = currency.lower() if named else ""
    content = f"reference,amount,currency,received_on,tenant\na,{text},{code},2026-11-12,acme\n"
    (tmp_path / "bank.csv").write_text(content)
    assert collect(tmp_path) == (cents is not None)
    assert [row.cents for row in unscoped(Payment).all()] == [cents] * (cents is not None)


def test_amounts_that_the_ledger_cannot_book_are_refused(yen):
    most, too_much = 10**9, 10**9 + 1
    for cents in (too_much, -too_much):
        with pytest.raises(ActionRefused, match="The largest amount is JPY 1,000,000,000"):
            do_record_payment(Received("manual", "p", cents, OCTOBER, tenant="acme"))
    with pytest.raises(ActionRefused, match="largest amount"):
        do_add_one_off_line(yen, month="2026-10", description="Setup", cents=too_much)
    with pytest.raises(ActionRefused, match="largest amount"):
        do_commit(yen, "Fee", fee=too_much, included_nano=1, first_month="2026-10")
    term: dict[str, Any] = {"description": "Minimum", "first_month": "2026-10"}
    with pytest.raises(ActionRefused, match="largest amount"):
        do_add_price_term(yen, TermRule(TermType.MINIMUM, cents=too_much), **term)
    do_record_payment(Received("manual", "p", most, OCTOBER, tenant="acme"))
    invoice = bill(yen, "5", currency="JPY")
    for issue in (do_issue_credit_note, do_issue_debit_note):
        with pytest.raises(ActionRefused, match="largest amount"):
            issue(invoice, [("Support", too_much)], "Support")
    assert {row.nano for row in unscoped(LedgerEntry).filter(account=Account.CASH)} == {most * YEN}


def test_the_command_shows_drafts_in_their_currency(yen, capsys):
    use(yen, OCTOBER, (price("500", book="jpy", currency="JPY", model="m"), MILLION))
    call_command("generate_invoices", "--month", "2026-10", "--draft")
    assert "acme: invoice of JPY 550" in capsys.readouterr().out
