"""Prepaid credit: taxed once, at its purchase or at its use; its refunds; and the documents and ledger of both."""

from __future__ import annotations

from datetime import UTC, date, datetime

import facturx
import pytest

from billing.invoicing import checks, ubl
from billing.invoicing.corrections import do_issue_credit_note, do_issue_debit_note, do_void, do_write_off
from billing.invoicing.drafts import creditable, do_close_period, do_draft
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.one_off_lines import do_add_one_off_line
from billing.invoicing.purchases import do_sell_credit
from billing.invoicing.setup import do_add_exchange_rate
from billing.ledger.booking import booking
from billing.ledger.credits import do_commit, do_grant_credit, grant_credit
from billing.ledger.ledger import balance
from billing.ledger.matching import sum_outstanding
from billing.models import Account, CreditApplication, CreditGrant, Invoice, LedgerEntry, UsageEvent
from tenants.actions import ActionRefused, Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tests.support.billing.books import (
    DECEMBER,
    over,
    period,
    start_credit_in_november,
    take_back,
)
from tests.support.billing.invoice_forms import attached, document_of, failed_rules, failed_ubl_rules, furnish
from tests.support.billing.prepaid_credit import CENT, MULTI, SINGLE, bill, change_entity, pay
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("in_november"), pytest.mark.acme(months=True)]


@pytest.fixture
def in_november(monkeypatch: pytest.MonkeyPatch) -> None:
    start_credit_in_november(monkeypatch)


@pytest.fixture
def acme(acme: Tenant) -> Tenant:
    furnish(acme, "S", 190_000)
    return acme


def on(account: Account, tenant: Tenant) -> int:
    with all_tenants_scope(BypassReason.BILLING):
        return balance(tenant.pk, account) // CENT


def purchase() -> Invoice:
    (found,) = unscoped(Invoice).filter(invoice_type=Invoice.InvoiceType.PURCHASE)
    return found


def state(invoice: Invoice) -> tuple[str, int]:
    with all_tenants_scope(BypassReason.BILLING):
        return Invoice.objects.all_tenants().get(pk=invoice.pk).state, sum_outstanding(invoice)


def check_documents(tenant: Tenant) -> None:
    """Validate every document: its XML, its recomputation, and its tax in the ledger."""
    rows = list(unscoped(Invoice).all())
    for row in rows:
        _, xml = attached(row)
        assert facturx.xml_check_xsd(xml, flavor="factur-x", level="en16931")
        assert (failed_rules(xml), failed_ubl_rules(ubl.xml(document_of(row)))) == ([], [])
        with all_tenants_scope(BypassReason.BILLING):
            loaded = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to").get(pk=row.pk)
            assert checks.check(loaded)[1:5] == (0, 0, True, True)
    check_ledger(tenant)


def check_ledger(tenant: Tenant) -> None:
    rows = unscoped(Invoice).all()  # a void invoice and its cancellation sum to zero
    taxed = sum((-1 if row.is_credit_note else 1) * item["tax"] for row in rows for item in row.taxes)
    assert on(Account.TAX, tenant) == -taxed
    granted = sum(grant.nano for grant in unscoped(CreditGrant).all())
    used = sum(use.nano for use in unscoped(CreditApplication).all())
    assert on(Account.CREDITS, tenant) == -(granted - used) // CENT
    assert sum(entry.nano for entry in unscoped(LedgerEntry).all()) == 0


@pytest.mark.parametrize("voucher_type", [SINGLE, MULTI])
def test_prepaid_credit_does_not_escape_vat(acme, voucher_type):
    """$119 with VAT of 19 % pay for usage of $100, whenever the VAT is due."""
    change_entity(voucher_type=voucher_type, iban="NL91ABNA0417164300", bic="ABNANL2A")
    pay(11_900, as_credit=True)
    bought, is_single = purchase(), voucher_type == SINGLE
    assert (bought.total, bought.prepaid, state(bought)) == (11_900, 11_900, ("paid", 0))
    assert sum(item["tax"] for item in bought.taxes) == on(Account.TAX, acme) * -1 == (1_900 if is_single else 0)
    (grant,) = unscoped(CreditGrant).all()
    assert (grant.nano // CENT, grant.is_taxed) == ((10_000, True) if is_single else (11_900, False))
    invoice = bill(acme, "110")
    assert (invoice.subtotal, on(Account.TAX, acme), on(Account.REVENUE, acme)) == (11_000, -2_090, -11_000)
    assert (invoice.total - invoice.prepaid, state(invoice)) == (1_190, ("open", 1_190))
    assert (on(Account.CREDITS, acme), on(Account.DEPOSITS, acme)) == (0, 0)
    # Of a credit note, what was paid in money returns first, then the credit.
    pay(1_190, "p2", invoice=invoice.number)
    do_issue_credit_note(invoice, [("SLA", 2_000)], "SLA")
    tax = -1_900 if is_single else -1_710  # returned credit of a single-purpose voucher keeps its tax
    assert (on(Account.TAX, acme), on(Account.REVENUE, acme), on(Account.DEPOSITS, acme)) == (tax, -9_000, -1_190)
    returned = max(unscoped(CreditGrant).all(), key=lambda row: row.pk)
    assert (returned.nano // CENT, returned.is_taxed) == ((1_000, True) if is_single else (1_190, False))
    assert (returned.grant_type, returned.purchase_id) == ("prepaid", bought.pk)
    check_documents(acme)


@pytest.mark.parametrize("voucher_type", [SINGLE, MULTI])
def test_only_credit_that_pays_totals_pays_one_off_lines_fees_and_debit_notes(acme, voucher_type):
    """$10 of usage, a line of $20 and a fee of $30, with VAT of 19 %: $71.40."""
    change_entity(voucher_type=voucher_type)
    pay(23_800, as_credit=True)  # $200 before tax
    do_add_one_off_line(acme, month="2026-11", description="Setup", cents=2_000)
    do_commit(acme, "Support", fee=3_000, included_nano=1, first_month="2026-11", last_month="2026-11")
    invoice = bill(acme, "10")
    debit = do_issue_debit_note(invoice, [("Training", 1_000)], "Training")
    is_payment = voucher_type == MULTI
    assert (invoice.taxable, invoice.total, invoice.prepaid) == (
        (6_000, 7_140, 7_140) if is_payment else (5_000, 5_950, 0)
    )
    assert (debit.total, debit.prepaid) == (1_190, 1_190 if is_payment else 0)
    check_ledger(acme)


def test_a_used_purchase_is_a_payment_beside_other_credit(acme):
    """Promotional credit reduces the taxable amount; prepaid credit pays the total. A void returns both."""
    pay(5_000, as_credit=True)
    do_grant_credit(acme, CreditGrant.GrantType.PROMOTIONAL, 2_000 * CENT)
    invoice = bill(acme, "40")
    assert (invoice.taxable, invoice.total, invoice.prepaid) == (2_000, 2_380, 2_380)
    assert state(invoice) == ("paid", 0)
    do_void(invoice, "wrong address")
    assert (on(Account.CREDITS, acme), on(Account.TAX, acme), on(Account.REVENUE, acme)) == (-7_000, 0, 0)
    check_ledger(acme)


@pytest.mark.parametrize("voucher_type", [SINGLE, MULTI])
def test_a_refund_takes_back_unused_credit(acme, voucher_type):
    change_entity(voucher_type=voucher_type)
    pay(11_900, as_credit=True)
    pay(-2_380, "r1", tenant="", refund_of="p1")
    (note,) = [row for row in unscoped(Invoice).all() if row.is_credit_note]
    assert (note.total, note.refers_to_id, state(purchase())) == (2_380, purchase().pk, ("paid", 0))
    bill(acme, "50")
    pay(-9_520, "r2", tenant="", refund_of="p1")  # $95.20, of which $59.50 are used
    assert state(purchase()) == ("open", 5_950)
    assert (on(Account.CREDITS, acme), on(Account.CASH, acme), on(Account.DEPOSITS, acme)) == (0, 0, 0)
    assert (on(Account.RECEIVABLE, acme), on(Account.TAX, acme)) == (5_950, -950)
    check_documents(acme)
    # The second refund fails: the purchase is paid again, and the rest buys credit again.
    pay(9_520, "r2:failed", tenant="", refund_of="p1")
    assert (state(purchase_of(0)), on(Account.DEPOSITS, acme), on(Account.RECEIVABLE, acme)) == (("paid", 0), 0, 0)
    assert on(Account.CREDITS, acme) == (-3_000 if voucher_type == SINGLE else -3_570)
    check_ledger(acme)


def test_payments_first_fill_deposits_that_a_refund_made_negative(acme):
    """Earlier releases granted prepaid credit from deposits without a purchase that could become outstanding."""
    pay(5_000)
    with booking(acme.pk):
        grant_credit(CreditGrant(tenant=acme, grant_type="prepaid", nano=5_000 * CENT, starts_at=datetime.now(UTC)))
    pay(-5_000, "r1", tenant="", refund_of="p1")
    assert on(Account.DEPOSITS, acme) == 5_000
    pay(3_000, "p2", as_credit=True)
    assert (on(Account.DEPOSITS, acme), on(Account.CASH, acme), unscoped(Invoice).count()) == (2_000, 3_000, 0)
    pay(3_000, "p3", as_credit=True)
    assert (on(Account.DEPOSITS, acme), purchase().total, on(Account.CREDITS, acme)) == (0, 1_000, -6_000)


def purchase_of(index: int) -> Invoice:
    return sorted(unscoped(Invoice).filter(invoice_type="purchase"), key=lambda row: row.pk)[index]


def test_credit_notes_return_money_first_in_the_order_of_their_issue(acme):
    """A correction that was drafted before a credit note, and issued after it, returns credit and no money."""
    pay(5_950, as_credit=True)
    invoice = bill(acme, "100")
    pay(5_950, "p2", invoice=invoice.number)
    assert (invoice.prepaid, state(invoice)) == (5_950, ("paid", 0))
    take_back(unscoped(UsageEvent).all()[0], DECEMBER)
    month = period(DECEMBER)
    do_close_period(month, now=over(month))
    (draft,) = do_draft(month, acme)
    do_issue_credit_note(invoice, [("SLA", 5_000)], "SLA")
    assert (on(Account.DEPOSITS, acme), on(Account.CREDITS, acme)) == (-5_950, 0)
    correction = do_finalize(draft, now=month.ends_at)
    assert correction.total == 5_950
    assert (on(Account.DEPOSITS, acme), on(Account.CREDITS, acme)) == (-5_950, -5_950)
    check_documents(acme)


def left(*invoices: Invoice) -> list[int]:
    with all_tenants_scope(BypassReason.BILLING):
        return [creditable(invoice) for invoice in invoices]


@pytest.mark.parametrize("voucher_type", [SINGLE, MULTI])
def test_debit_notes_are_paid_like_their_invoice(acme, voucher_type):
    """Prepaid credit pays a debit note with tax; credit notes on both documents return at most what each charged."""
    change_entity(voucher_type=voucher_type, iban="NL91ABNA0417164300", bic="ABNANL2A")
    pay(17_850, as_credit=True)
    invoice = bill(acme, "100")
    debit = do_issue_debit_note(invoice, [("Support", 10_000)], "Support")
    single = voucher_type == SINGLE  # its credit pays usage only
    assert (debit.subtotal, debit.total, debit.prepaid) == (10_000, 11_900, 0 if single else 5_950)
    assert left(invoice, debit) == [10_000, 10_000]
    owed = debit.total - debit.prepaid
    assert state(debit) == ("open", owed)
    _, xml = attached(debit)
    assert b"IBANID" in xml and f"<ram:DuePayableAmount>{owed / 100:.2f}<".encode() in xml
    do_write_off(debit, "insolvent")
    pay(owed, "p2", invoice=debit.number)
    assert (state(debit), on(Account.BAD_DEBT, acme)) == (("paid", 0), 0)
    do_issue_credit_note(debit, [("SLA", 10_000)], "SLA")
    do_issue_credit_note(invoice, [("SLA", 10_000)], "SLA")
    assert left(invoice, debit) == [0, 0]
    assert (on(Account.REVENUE, acme), on(Account.RECEIVABLE, acme)) == (0, 0)
    assert (on(Account.DEPOSITS, acme), on(Account.CREDITS, acme)) == (-owed, -15_000 if single else -17_850)
    check_documents(acme)


def test_purchases_are_refused_before_they_have_a_number(acme):
    change_entity(voucher_type=SINGLE)
    with pytest.raises(Conflict, match="advance payments are too low"):
        do_sell_credit(acme, 100 * CENT)
    pay(118)
    with pytest.raises(Conflict, match="advance payments are too low"):
        do_sell_credit(acme, 100 * CENT)
    pay(1, "p2")
    assert do_sell_credit(acme, 100 * CENT).nano == 100 * CENT
    for nano in (0, -CENT, CENT + 1):
        with pytest.raises(ActionRefused, match=r"multiples of \$0\.01"):
            do_sell_credit(acme, nano)
    with pytest.raises(ActionRefused, match="is sold"):
        do_grant_credit(acme, CreditGrant.GrantType.PREPAID, CENT)
    bought = purchase()
    with pytest.raises(Conflict, match="cannot be voided"):
        do_void(bought, "wrong")
    with pytest.raises(Conflict, match="cannot be credited"):
        do_issue_credit_note(bought, [("SLA", 1)], "SLA")
    assert bought.number.endswith("000001")


def test_the_tax_is_also_in_the_currency_of_the_sellers_returns(acme):
    """EN 16931 BT-6 and BT-111. A credit note has the rate of its invoice."""
    change_entity(tax_currency="EUR", voucher_type=SINGLE, max_rate_age_days=32_000)
    with pytest.raises(Conflict, match="no exchange rate of EUR"):
        pay(11_900, as_credit=True)
    assert not unscoped(Invoice).all()
    do_add_exchange_rate(currency="EUR", on=date(2026, 1, 1), micro_per_usd=900_000)
    pay(11_900, as_credit=True)
    do_add_exchange_rate(currency="EUR", on=datetime.now(UTC).date(), micro_per_usd=500_000)
    pay(-5_950, "r1", refund_of="p1")
    for row, euros in zip(sorted(unscoped(Invoice).all(), key=lambda row: row.pk), ("17.10", "8.55"), strict=True):
        _, xml = attached(row)
        assert b"<ram:TaxCurrencyCode>EUR</ram:TaxCurrencyCode>" in xml
        assert f'<ram:TaxTotalAmount currencyID="EUR">{euros}</ram:TaxTotalAmount>'.encode() in xml
    check_documents(acme)


@pytest.mark.parametrize("fields", [{}, {"tenant": "", "refund_of": "p1"}])
def test_a_refund_takes_back_credit_that_was_sold_from_deposits(acme, fields):
    pay(11_900)
    do_sell_credit(acme, 11_900 * CENT)
    pay(-11_900, "r1", **fields)
    assert (on(Account.CASH, acme), on(Account.DEPOSITS, acme), on(Account.CREDITS, acme)) == (0, 0, 0)
    assert (state(purchase()), on(Account.RECEIVABLE, acme)) == (("paid", 0), 0)
    check_documents(acme)


def test_a_refund_reopens_invoices_before_it_takes_back_credit_of_other_payments(acme):
    pay(5_000, as_credit=True)
    invoice = bill(acme, "100")
    pay(6_900, "p2", invoice=invoice.number)
    pay(2_000, "p3", as_credit=True)
    pay(-6_900, "r1", tenant="", refund_of="p2")
    assert state(invoice) == ("open", 6_900)
    assert on(Account.CREDITS, acme) == -2_000


def test_credit_notes_return_the_tax_in_the_tax_currency_exactly(acme):
    """Tax of 0.19 is 0.17 in EUR. Halves of 0.095 would return 0.18."""
    change_entity(tax_currency="EUR", max_rate_age_days=32_000)
    do_add_exchange_rate(currency="EUR", on=date(2026, 1, 1), micro_per_usd=900_000)
    invoice = bill(acme, "1")
    notes = [do_issue_credit_note(invoice, [("SLA", cents)], "SLA") for cents in (50, 50)]
    taxes = [document_of(row)["tax_currency"]["tax"] for row in (invoice, *notes)]
    assert taxes[0] == sum(taxes[1:])
    check_documents(acme)


def test_a_purchase_that_its_credit_note_pays_is_reopened_by_the_rest_of_a_refund(acme):
    """The refund names no payment, so that only the reopening takes back credit."""
    change_entity(voucher_type=MULTI, iban="NL91ABNA0417164300", bic="ABNANL2A")
    pay(11_900, as_credit=True)
    invoice = bill(acme, "100")
    pay(-5_000, "r1", tenant="", refund_of="p1")
    assert state(purchase()) == ("open", 5_000)
    do_void(invoice, "wrong address")
    pay(-6_900, "r2")
    owed = on(Account.RECEIVABLE, acme)
    assert (state(purchase()), owed > 0) == (("open", owed), True)
    assert on(Account.DEPOSITS, acme) == 0
    check_ledger(acme)
